from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jointrag.data.errors import ConfigError
from jointrag.data.types import Passage
from jointrag.retrieval import CachedIndex, Hits, build_index, load_index
from jointrag.retrieval.bm25 import Bm25Index


class Counting(Bm25Index):
    """BM25 that notes what it is asked."""

    calls: list[list[str]]

    def search(self, queries: Sequence[str], n: int) -> list[Hits]:
        self.calls.append(list(queries))
        return super().search(queries, n)


@pytest.fixture
def inner(passages: list[Passage]) -> Counting:
    index: Any = build_index({"type": "bm25"}, passages)
    index.__class__, index.calls = Counting, []
    assert isinstance(index, Counting)
    return index


def test_only_new_queries_reach_the_index_in_one_call(inner: Counting) -> None:
    cached = CachedIndex(inner)
    cached.search(["otter", "heron", "otter"], 5)
    cached.search(["lynx", "heron", "plover"], 5)
    assert inner.calls == [["otter", "heron"], ["lynx", "plover"]]
    # six asked: "otter" the second time and "heron" the second time came from memory
    assert (cached.asked, cached.remembered, cached.hit_rate) == (6, 2, 2 / 6)


def test_another_n_is_another_search(inner: Counting) -> None:
    cached = CachedIndex(inner)
    assert [len(cached.search(["otter"], n)[0].ids) for n in (3, 5, 3)] == [3, 5, 3]
    assert inner.calls == [["otter"], ["otter"]]


def test_the_least_recently_used_goes_first(inner: Counting) -> None:
    cached = CachedIndex(inner, size=2)
    for query in ("otter", "heron", "otter", "lynx", "otter", "heron"):
        cached.search([query], 5)
    assert [c for c in inner.calls if c] == [["otter"], ["heron"], ["lynx"], ["heron"]]


def test_hit_rate_before_the_first_search_is_zero(inner: Counting) -> None:
    assert CachedIndex(inner).hit_rate == 0.0


def test_wrong_calls_are_refused_as_the_index_refuses_them(inner: Counting) -> None:
    for queries, n in (("otter", 5), (["otter"], 0)):
        with pytest.raises(ConfigError):
            CachedIndex(inner).search(queries, n)


def test_saving_saves_the_inner_index(inner: Counting, passages: list[Passage], tmp_path: Path) -> None:
    CachedIndex(inner).save(tmp_path / "index")
    assert load_index(tmp_path / "index", passages).type == "bm25"

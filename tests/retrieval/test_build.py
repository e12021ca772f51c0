from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from jointrag.data.errors import ConfigError
from jointrag.data.types import Passage
from jointrag.retrieval import build_index, index_class, index_spec
from jointrag.retrieval.bm25 import Bm25Index
from jointrag.retrieval.registry import INDEXES, register


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "bm52"}, r"index.type: got 'bm52', expected one of bm25, dense, hybrid, http.*Did you mean 'bm25'\?"),
        ({"type": None}, r"index.type: got None"),
        ({"type": ["bm25"]}, r"index.type: got \['bm25'\]"),
        ({"type": "bm25", "candidate": 5}, r"index.candidate: got an unknown key.*Did you mean 'candidates'\?"),
        ({"type": "bm25", "pool": 5}, r"index.pool: got an unknown key"),  # a key of hybrid
        ({"type": "bm25", "candidates": 0}, r"index.candidates: got 0, expected"),
        ({"type": "bm25", "candidates": "many"}, r"index.candidates: got 'many'"),
        ({"type": "bm25", "vectors": "glove"}, r"index.vectors: got 'glove', expected"),
        ({"type": "dense", "dim": -1}, r"index.dim: got -1"),
        ({"type": "bm25", "b": 2}, r"index.b: got 2"),
        ({"type": "http", "url": "ftp://x"}, r"index.url: got 'ftp://x'"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        index_spec(settings)


def test_the_interfaces_own_line_is_the_default() -> None:
    assert index_spec({"type": "bm25", "candidates": 20, "vectors": "svd"}) == index_spec({})


@pytest.mark.parametrize("name", sorted(INDEXES))
def test_every_registered_class_carries_its_name(name: str) -> None:
    assert index_class(name).type == name == index_spec({"type": name}).type


def test_a_plugins_type_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch, passages: list[Passage]) -> None:
    monkeypatch.setattr("jointrag.retrieval.registry.INDEXES", INDEXES)
    monkeypatch.delitem(INDEXES, "mine", raising=False)
    register("mine", Bm25Index)
    try:
        assert index_class("mine") is Bm25Index
    finally:
        del INDEXES["mine"]


def test_importing_retrieval_and_reading_settings_imports_nothing_heavy() -> None:
    heavy = {"torch", "bm25s", "faiss", "sklearn", "scipy", "sentence_transformers", "transformers"}
    code = (
        "import sys; before = set(sys.modules)\n"
        "from jointrag.retrieval import index_spec\n"
        "for name in ('bm25', 'dense', 'hybrid', 'http'): index_spec({'type': name})\n"
        f"print(sorted({heavy!r} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_building_and_searching_bm25_imports_no_torch(passages: list[Passage]) -> None:
    code = (
        "import sys\nfrom jointrag.data.types import Passage\nfrom jointrag.retrieval import build_index\n"
        "had = 'torch' in sys.modules\n"
        "build_index({'type': 'hybrid'}, [Passage('a', 'Otter', 'wet fur')]).search(['otter'], 1)\n"
        "print(had or 'torch' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert build_index({"type": "bm25"}, passages).type == "bm25"

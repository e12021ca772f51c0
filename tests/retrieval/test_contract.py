"""What every registered index must keep; a new line in the registry is tested the day it is added."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jointrag.data.errors import ConfigError, DataError, IndexMismatchError, StorageError
from jointrag.data.types import Passage
from jointrag.retrieval import CachedIndex, Hits, Index, build_index, load_index

QUERIES = [
    "where does the otter live?",
    "pebble",  # 30 passages tie
    "heron marsh",
    "",
    "zzz qqq",  # no known word
    "the of and",  # stop words only
    "grey beach river",
    "LYNX",
    "lone \ud800 surrogate otter",
    "plover " * 400,
    "\x00\x07",
]
NS = (1, 5, 20, 48, 1000)


def same(left: list[Hits], right: list[Hits]) -> bool:
    return all(
        a.ids == b.ids and a.scores.tobytes() == b.scores.tobytes() and a.rows.tobytes() == b.rows.tobytes()
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("n", NS)
def test_search_gives_min_of_n_and_corpus_distinct_passages(index: Index, n: int) -> None:
    for hits in index.search(QUERIES, n):
        assert len(set(hits.ids)) == len(hits.ids) == min(n, 48)
        assert [index.ids[row] for row in hits.rows] == list(hits.ids)
        assert hits.scores.dtype == np.float32 and hits.rows.dtype == np.int64
        assert np.isfinite(hits.scores).all()


@pytest.mark.parametrize("n", NS)
def test_hits_come_by_falling_score_and_ties_by_row(index: Index, n: int) -> None:
    for hits in index.search(QUERIES, n):
        keys = [(-score, row) for score, row in zip(hits.scores.tolist(), hits.rows.tolist(), strict=True)]
        assert keys == sorted(keys)


@pytest.mark.parametrize("n", NS)
def test_a_query_alone_finds_the_same_bytes_as_in_a_batch(index: Index, n: int) -> None:
    batch = index.search(QUERIES, n)
    assert same([index.search([q], n)[0] for q in QUERIES], batch)
    assert same(index.search(QUERIES[::-1] * 40, n)[: len(QUERIES)][::-1], batch)


def test_the_best_five_are_the_first_five_of_the_best_twenty(index: Index) -> None:
    for five, twenty in zip(index.search(QUERIES, 5), index.search(QUERIES, 20), strict=True):
        assert five.ids == twenty.ids[:5]


def test_two_builds_are_equal(index: Index, passages: list[Passage], settings: Callable[[str], dict[str, Any]]) -> None:
    again = build_index(settings(index.type), passages)
    assert same(again.search(QUERIES, 20), index.search(QUERIES, 20))
    assert again.vectors(again.ids).tobytes() == index.vectors(index.ids).tobytes()


def test_a_passage_is_found_by_its_own_title(index: Index, passages: list[Passage]) -> None:
    hits = index.search([p.title for p in passages[:18]], 3)
    assert all(p.id in h.ids for p, h in zip(passages, hits, strict=False))


def test_vectors_are_unit_rows_by_id_and_by_row(index: Index) -> None:
    by_id, by_row = index.vectors(index.ids), index.vectors(range(48))
    assert by_id.shape == (48, index.dim) and by_id.dtype == np.float32
    assert by_id.tobytes() == by_row.tobytes()
    assert np.allclose(np.linalg.norm(by_id, axis=1), 1.0, atol=1e-6)


def test_query_vectors_do_not_depend_on_the_batch(index: Index) -> None:
    batch = index.query_vectors(QUERIES)
    assert batch.shape == (len(QUERIES), index.dim) and batch.dtype == np.float32
    assert np.stack([index.query_vectors([q])[0] for q in QUERIES]).tobytes() == batch.tobytes()
    norms = np.linalg.norm(batch, axis=1)
    assert np.all((np.abs(norms - 1) < 1e-6) | (norms == 0))


def test_no_query_gives_no_hits_and_no_vectors(index: Index) -> None:
    assert index.search([], 5) == []
    assert index.query_vectors([]).shape == (0, index.dim)


def test_a_bare_string_is_refused(index: Index) -> None:
    with pytest.raises(ConfigError, match=r"expected a list of queries"):
        index.search("otter", 5)


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_one_is_refused(index: Index, n: int) -> None:
    with pytest.raises(ConfigError, match=f"got n={n}, expected at least 1"):
        index.search(["otter"], n)


def test_passages_are_given_by_id_and_unknown_ids_refused(index: Index, passages: list[Passage]) -> None:
    assert index.passages(["same03", "p00"]) == [passages[21], passages[0]]
    with pytest.raises(DataError, match="'nope'"):
        index.passages(["nope"])


def test_save_and_load_change_no_byte(index: Index, passages: list[Passage], tmp_path: Path) -> None:
    index.save(tmp_path / "index")
    loaded = load_index(tmp_path / "index", passages)
    assert type(loaded) is type(index) and loaded.spec == index.spec and loaded.dim == index.dim
    for n in NS:
        assert same(loaded.search(QUERIES, n), index.search(QUERIES, n))
    assert loaded.vectors(loaded.ids).tobytes() == index.vectors(index.ids).tobytes()
    assert loaded.query_vectors(QUERIES).tobytes() == index.query_vectors(QUERIES).tobytes()
    loaded.save(tmp_path / "index")  # over itself
    assert same(load_index(tmp_path / "index", passages).search(QUERIES, 5), index.search(QUERIES, 5))
    assert os.listdir(tmp_path) == ["index"]


def test_two_saves_are_equal_bytes(index: Index, tmp_path: Path) -> None:
    index.save(tmp_path / "a")
    index.save(tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_an_index_of_another_corpus_is_refused(index: Index, passages: list[Passage], tmp_path: Path) -> None:
    index.save(tmp_path / "index")
    for other in (passages[::-1], passages[:-1], [*passages[:-1], Passage("same29", "Pebble", "Another text.")]):
        with pytest.raises(IndexMismatchError, match=r"got an index of another corpus .* expected .* build it again"):
            load_index(tmp_path / "index", other)


def test_an_index_with_other_settings_is_refused(
    index: Index, passages: list[Passage], settings: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    index.save(tmp_path / "index")
    wanted = settings(index.type)
    with pytest.raises(IndexMismatchError, match=r"built with dim=16, expected dim=32"):
        load_index(tmp_path / "index", passages, wanted | {"dim": 32})
    with pytest.raises(IndexMismatchError, match=r"type='.*expected"):
        load_index(tmp_path / "index", passages, settings("bm25" if index.type != "bm25" else "dense"))
    assert load_index(tmp_path / "index", passages, wanted | {"candidates": 7}).candidates == 7


def test_each_damaged_or_missing_file_is_refused(index: Index, passages: list[Passage], tmp_path: Path) -> None:
    index.save(tmp_path / "index")
    files = json.loads((tmp_path / "index/manifest.json").read_text())["files"]
    assert files
    for name in files:
        path = tmp_path / "index" / name
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(IndexMismatchError, match=f"a damaged {name}"):
            load_index(tmp_path / "index", passages)
        path.unlink()
        with pytest.raises(IndexMismatchError, match=f"got no {name}"):
            load_index(tmp_path / "index", passages)
        path.write_bytes(good)
    load_index(tmp_path / "index", passages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "got no manifest.json"),
        ("", "damaged manifest.json"),
        ("{", "damaged manifest.json"),
        ("[]", "damaged manifest.json"),
        ("{}", "damaged manifest.json"),
        ('{"format": 99, "settings": {}, "corpus": "", "passages": 1, "files": {}}', "index format 99"),
    ],
)
def test_a_bad_manifest_is_refused(passages: list[Passage], tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(IndexMismatchError, match=message):
        load_index(tmp_path, passages)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd"])
def test_a_manifest_that_leaves_its_folder_is_refused(passages: list[Passage], tmp_path: Path, name: str) -> None:
    build_index({"type": "bm25"}, passages).save(tmp_path / "index")
    path = tmp_path / "index/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(IndexMismatchError, match="files of the folder itself"):
        load_index(tmp_path / "index", passages)


def test_a_manifest_with_settings_of_another_version_is_refused(passages: list[Passage], tmp_path: Path) -> None:
    build_index({"type": "bm25"}, passages).save(tmp_path / "index")
    path = tmp_path / "index/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["settings"]["type"] = "quantum"
    path.write_text(json.dumps(manifest))
    with pytest.raises(IndexMismatchError, match="'quantum'"):
        load_index(tmp_path / "index", passages)


def test_a_full_disk_is_a_storage_error_and_leaves_the_older_index(
    index: Index, passages: list[Passage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.save(tmp_path / "index")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(StorageError, match=r"No space left on device.*expected .*free space"):
            index.save(tmp_path / "index")
    assert os.listdir(tmp_path) == ["index"]
    load_index(tmp_path / "index", passages)


def test_a_folder_that_cannot_be_written_is_a_storage_error(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="expected a writable folder"):
        index.save(tmp_path / "file" / "index")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_a_storage_error(index: Index, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied"):
        index.save(tmp_path / "index")
    tmp_path.chmod(0o700)


def test_saving_never_replaces_something_that_is_no_index(index: Index, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(StorageError, match="holds something else"):
        index.save(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_hits_pickle(index: Index) -> None:
    hits = index.search(["otter"], 3)
    assert same(pickle.loads(pickle.dumps(hits)), hits)


def test_building_leaves_its_input_alone(passages: list[Passage], settings: Callable[[str], dict[str, Any]]) -> None:
    given, before = settings("bm25"), list(passages)
    build_index(given, passages)
    assert given == settings("bm25") and passages == before


def test_a_corpus_of_one_passage_works(index: Index, settings: Callable[[str], dict[str, Any]]) -> None:
    one = build_index(settings(index.type), [Passage("p00", "Otter river", "The otter lives by the river.")])
    if index.type != "http":  # whose server has another corpus
        assert [h.ids for h in one.search(["otter", ""], 5)] == [("p00",), ("p00",)]
    assert one.vectors(["p00"]).shape == (1, one.dim)


def test_an_empty_corpus_and_a_repeated_id_are_refused(index: Index, settings: Callable[[str], dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"got (an empty corpus|0 passages)"):
        build_index(settings(index.type), [])
    with pytest.raises(DataError, match="got passage id 'a' twice"):
        build_index(settings(index.type), [Passage("a", "One", "first text"), Passage("a", "Two", "second text")])


def test_a_cached_index_finds_what_its_inner_index_finds(index: Index) -> None:
    cached = CachedIndex(index)
    for _ in range(2):
        assert same(cached.search(QUERIES, 5), index.search(QUERIES, 5))
    assert cached.vectors([3]).tobytes() == index.vectors([3]).tobytes()

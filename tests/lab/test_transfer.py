"""Conditions of the transfer table: what each flag changes in a run's config, and the table itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jointrag.configs.load import dump_config, load_config
from jointrag.data.errors import CheckpointError, ConfigError
from jointrag.lab.transfer import conditions, table, transfer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("demo", ["data.world.seed=7"])))
    (tmp_path / "heads").mkdir()
    return tmp_path


def test_worlds_are_unseen_of_more_hops_harder_or_by_keys(folder: Path) -> None:
    own, unseen, hops, hard, keys = conditions(folder, ["unseen", "hops", "hard", "twins=0.5 passages=900"], [], [])
    worlds: list[Any] = [c.config.data.world for c in (own, unseen, hops, hard, keys)]
    assert [w.seed for w in worlds] == [7, 8, 8, 8, 7]
    assert (worlds[2].mix.three, worlds[2].mix.one, worlds[2].mix.bridge) == (1.0, 0.0, 0.0)
    assert worlds[3].twins > worlds[0].twins and worlds[3].name_pool < worlds[0].name_pool
    assert (worlds[4].twins, worlds[4].passages) == (0.5, 900)
    assert own.own_index and not unseen.own_index


def test_an_index_is_a_type_or_a_whole_spec_and_data_those_of_another_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"id": "1", "title": "t", "text": "x"}\n')
    (tmp_path / "q.jsonl").write_text('{"id": "1", "question": "?", "answers": ["x"]}\n')
    (tmp_path / "other.yaml").write_text("data: {corpus: c.jsonl, train: q.jsonl, test: q.jsonl}\n")
    found = conditions(folder, [], ["hybrid", "{type: dense, dim: 64}"], [str(tmp_path / "other.yaml")])
    assert [c.name for c in found] == ["own", "index hybrid", "index {type: dense, dim: 64}", "data other"]
    assert found[1].config.index["type"] == "hybrid" and found[2].config.index["dim"] == 64
    assert found[3].config.data.world is None and str(found[3].config.data.test).endswith("q.jsonl")
    assert found[3].config.rewards == found[0].config.rewards


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"worlds": ["unsen"]}, "Did you mean 'unseen'"),
        ({"worlds": ["twin=0.5"]}, "data.world.twin"),
        ({"indexes": ["{type: }"]}, "index"),
        ({"worlds": ["unseen", "unseen"]}, "got 'world unseen' twice"),
        ({"data": ["nowhere.yaml"]}, "nowhere.yaml: got no such file"),
        ({"data": ["untested.yaml"]}, "got untested.yaml without data.test"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(
    folder: Path, asked: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("untested.yaml").write_text("data: {corpus: c.jsonl, train: q.jsonl}\n")
    with pytest.raises(ConfigError, match=told):
        conditions(folder, **{"worlds": [], "indexes": [], "data": [], **asked})


def test_a_run_without_warm_heads_has_nothing_to_compare_with(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="got a run without warm heads"):
        transfer(folder, conditions(folder, [], [], []))


def test_the_table_has_a_line_a_condition() -> None:
    def figure(mean: float, **more: Any) -> dict[str, Any]:
        return {"mean": mean, "interval": [mean - 0.1, mean + 0.1], **more}

    block = {"f1": figure(0.5), "support_recall": figure(0.6), "searches": figure(2.0)}
    row = {
        "condition": "own",
        "n": 600,
        "before": block,
        "after": block,
        "after_minus_before": {"f1": figure(0.2, p=0.01)},
    }
    last = table({"rows": [row]}).splitlines()[-1].split()
    assert last == ["own", "600", "0.500", "0.500", "+0.200", "[+0.100,", "+0.300]", "0.010", "0.600", "2.00"]

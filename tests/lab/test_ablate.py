"""The arms of an ablation, the runs they become, and the table, on rows written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jointrag.configs.load import dump_config, load_config
from jointrag.data.errors import CheckpointError, ConfigError, DataError, JointragError
from jointrag.lab.ablate import (
    FULL,
    Arm,
    Grid,
    arm_folder,
    check,
    compare,
    find_grid,
    grid_arms,
    grid_runs,
    inference_arms,
    make_grid,
    read_grid,
    without_reward,
)
from jointrag.rewards.build import config_rewards

AGENTS = ("rewriter", "retriever", "filter", "answerer")


def rows(*f1: float, searches: int = 2) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "f1": x, "searches": searches, "tokens": 100, "llm_calls": 4} for n, x in enumerate(f1)]


# arms


def test_at_inference_every_agent_takes_every_other_mode_it_can() -> None:
    arms = inference_arms(
        {"rewriter": True, "tool": False}, {"rewriter": "heads/other"}, warm=True, oracles=True, held={}
    )
    names = [FULL, *(f"rewriter={m}" for m in ("default", "trunk", "warm", "oracle", "swap"))]
    assert list(arms) == [*names, "tool=default", "tool=oracle"]
    assert arms[FULL] == {} and arms["rewriter=swap"] == {"rewriter": "swap"}
    assert list(inference_arms({"a": True}, {}, warm=False, oracles=False, held={})) == [FULL, "a=default", "a=trunk"]
    assert list(inference_arms({"a": True}, {}, warm=False, oracles=False, held={"a": "default"})) == [FULL, "a=trunk"]


def test_a_grid_names_what_each_arm_changes() -> None:
    grid = Grid(
        config="demo", drop=["filter"], freeze=["rewriter"], only=["answerer"], prompt=["retriever"],
        swap={"filter": "heads/filter"}, share=True, drop_reward=["filter", "team.no_answer"],
        arms={"ippo": ["marl.algorithm=ippo"]},
    )  # fmt: skip
    arms = {a.name: a for a in grid_arms(grid, load_config("demo"), AGENTS)}
    assert arms[FULL].overrides == ()
    assert arms["drop filter"].overrides == ("agents.filter.mode=default",)
    assert arms["freeze rewriter"].overrides == ("agents.rewriter.mode=frozen",)
    assert arms["prompt retriever"].overrides == ("agents.retriever.mode=trunk",)
    assert arms["only answerer"].overrides == tuple(f"agents.{a}.mode=frozen" for a in AGENTS[:3])
    assert arms["swap filter"].overrides == ('agents.filter.mode={swap: "heads/filter"}',)
    assert arms["ippo"].overrides == ("marl.algorithm=ippo",)
    assert {a.name for a in arms.values() if a.own_start} == {"one shared head"}


def test_an_arm_is_a_config_that_loads() -> None:
    grid = Grid(
        config="demo", drop=["filter"], swap={"filter": "a b/c"}, drop_reward=["rewriter.stop_timing", "filter"]
    )
    found = {a.name: load_config("demo", a.overrides) for a in grid_arms(grid, load_config("demo"), AGENTS)}
    assert found["drop filter"].agent("filter").mode == "default"
    assert [t["type"] for t in found["no reward rewriter.stop_timing"].rewards.process["rewriter"]] == [
        "retrieval_gain"
    ]
    assert "filter" not in found["no reward filter"].rewards.process


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ({"drop": ["fliter"]}, "Did you mean 'filter'"),
        ({"only": ["x"]}, "only: got 'x', expected one of rewriter"),
        ({"drop_reward": ["rewriter.f1"]}, "expected a term of rewriter: retrieval_gain, stop_timing"),
        ({"drop_reward": ["nobody"]}, "expected one of team, rewriter"),
        ({"drop": ["filter", "filter"]}, "got 'drop filter' twice"),
        ({}, "got no arm to compare"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(grid: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        grid_arms(Grid(config="demo", **grid), load_config("demo"), AGENTS)


def test_a_grid_is_three_lines_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("config: mine.yaml\nseeds: [4, 5]\ndrop: [filter]\n")
    assert read_grid(tmp_path / "grid.yaml").config == "mine.yaml"  # a shipped name, or relative to where one works
    (tmp_path / "mine.yaml").write_text("extends: demo\n")
    grid = read_grid(tmp_path / "grid.yaml")
    assert (grid.config, grid.seeds, grid.drop) == (str(tmp_path / "mine.yaml"), [4, 5], ["filter"])
    (tmp_path / "grid.yaml").write_text("config: mine.yaml\ndorp: [filter]\n")
    with pytest.raises(ConfigError, match=r"dorp.*Did you mean 'drop'"):
        read_grid(tmp_path / "grid.yaml")


@pytest.mark.parametrize("name", ["agents", "switches", "costly"])
def test_every_arm_of_a_shipped_grid_is_a_config_that_can_be_trained(name: str) -> None:
    path = find_grid(name)
    assert path is not None
    grid = read_grid(path)
    config = load_config(grid.config, grid.common)
    for arm in grid_arms(grid, config, AGENTS):
        arms = load_config(grid.config, [*grid.common, *arm.overrides])
        assert arm.name == FULL or arms != config, arm.name
        config_rewards(arms, AGENTS, arms.graph.max_hops)


def test_what_is_no_grid_is_taken_for_a_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: demo\n")
    assert find_grid(str(tmp_path / "mine.yaml")) is None and find_grid("demo") is None


def test_all_terms_or_one_term_of_a_reward_are_left_out() -> None:
    config = load_config("demo")
    assert without_reward(config, "filter") == "rewards.process.filter=[]"
    assert without_reward(config, "team.no_answer") == "rewards.team=[{type: f1, weight: 1.0}]"


# runs


def test_arms_share_warm_start_and_index_of_the_full_pipeline_where_they_can(tmp_path: Path) -> None:
    grid = Grid(config="demo", seeds=[4], drop=["filter"], share=True, out=str(tmp_path))
    arms = grid_arms(grid, load_config("demo"), AGENTS)
    full, drop, shared = grid_runs(grid, load_config("demo"), arms)
    assert full.out == arm_folder(tmp_path, arms[0], 4) == tmp_path / "full-4"
    assert (full.ready, drop.ready, shared.ready) == (True, False, True)
    (full.out / "index").mkdir(parents=True)
    (full.out / "index" / "manifest.json").write_text("{}")
    (full.out / "warm.json").write_text("{}")
    assert drop.ready
    command = drop.command()
    assert f"warm_start.run={json.dumps(str(full.out))}" in command
    assert {"seed=4", "data.world.seed=4", "agents.filter.mode=default"} < set(command)
    assert (drop.out / "index" / "manifest.json").read_text() == "{}"
    assert not any(w.startswith("warm_start.run") for w in [*full.command(), *shared.command()])


def test_a_folder_with_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    grid = Grid(config="demo", seeds=[4], drop=["filter"], out=str(tmp_path))
    arms = grid_arms(grid, load_config("demo"), AGENTS)
    own = ["seed=4", "data.world.seed=4", "sft_more.steps=0", "eval.variants=[after]", f"out={tmp_path / 'full-4'}"]
    (tmp_path / "full-4").mkdir()
    (tmp_path / "full-4" / "config.yaml").write_text(dump_config(load_config("demo", own)))
    assert grid_runs(grid, load_config("demo"), arms)[0].out == tmp_path / "full-4"
    (tmp_path / "full-4" / "config.yaml").write_text(dump_config(load_config("demo", [*own, "marl.updates=3"])))
    with pytest.raises(CheckpointError, match=r"full-4: got a run of other settings \(marl.updates is 3, here 30\)"):
        grid_runs(grid, load_config("demo"), arms)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({"seeds": [1, 1]}, "seeds that differ; got"),
        ({"common": ["out=x"]}, "no out among the overrides"),
        ({"arms": {"a": ["seed=3"]}}, "no seed among the overrides"),
    ],
)
def test_what_every_run_has_of_its_own_cannot_be_set_for_all(sets: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_grid({"config": "demo", "drop": ["filter"], **sets}, "here")


def test_a_whole_section_changes_what_precedes_training_as_its_keys_do() -> None:
    assert Arm("x", ("index={type: dense}",)).own_start and Arm("x", ("index.type=dense",)).own_start
    assert not Arm("x", ("marl.clip=0.3",)).own_start


@pytest.mark.parametrize(
    "override",
    ["marl.credit=shapely", "index={type: bm26}", "rewards.team=[{type: f2}]", "agents.filter.mode={swap: nowhere}"],
)
def test_an_arm_that_would_fail_later_is_refused_before_anything_is_trained(override: str) -> None:
    with pytest.raises(JointragError):
        check(load_config("demo", [override]))


def test_arms_of_files_get_the_seed_of_training_alone(tmp_path: Path) -> None:
    data = {"corpus": "c.jsonl", "train": "t.jsonl", "test": "t.jsonl"}
    config = load_config({"data": data})
    (run,) = grid_runs(Grid(config="x", seeds=[4], out=str(tmp_path)), config, [Arm(FULL)])
    assert not any(w.startswith("data.") for w in run.command())


# the table


def test_the_table_compares_each_arm_with_the_full_pipeline() -> None:
    n = 100
    arms = {FULL: [rows(*[1.0] * 80 + [0.0] * 20)], "drop": [rows(*[1.0] * 50 + [0.0] * 50, searches=1)]}
    found = compare(arms, 2000)
    full, drop = found["rows"]
    assert (found["n"], found["seeds"]) == (n, 1)
    assert full["arm"] == FULL and full["f1"]["mean"] == 0.8 and "minus_full" not in full
    assert drop["minus_full"]["mean"] == pytest.approx(-0.3)
    assert drop["minus_full"]["interval"][1] < 0 and drop["minus_full"]["p"] < 0.01
    assert (drop["searches"], drop["tokens"]) == (1.0, 100.0)


def test_p_values_are_corrected_over_the_arms() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(60)
    arms = {FULL: [rows(*base)], "a": [rows(*(base - 0.02 * rng.random(60)))], "b": [rows(*base)]}
    _, a, b = compare(arms, 2000)["rows"]
    assert a["minus_full"]["p_holm"] == pytest.approx(min(1.0, 2 * a["minus_full"]["p"]))
    assert (b["minus_full"]["p"], b["minus_full"]["p_holm"]) == (1.0, 1.0)


def test_arms_that_answered_other_questions_are_refused() -> None:
    with pytest.raises(DataError, match="got other questions in 'drop'"):
        compare({FULL: [rows(1.0, 0.0)], "drop": [rows(1.0)]}, 100)


def test_a_lucky_seed_is_no_evidence() -> None:
    # 200 questions agree within each of three seeds, whose means are +.2, -.1 and +.1
    rng = np.random.default_rng(0)
    base = [rng.random(200) for _ in range(3)]
    shifted = [b + d for b, d in zip(base, (0.2, -0.1, 0.1), strict=True)]
    found = compare({FULL: [rows(*b) for b in base], "arm": [rows(*b) for b in shifted]}, 2000)["rows"][1]["minus_full"]
    assert found["interval"][0] < 0 < found["interval"][1] and found["p"] > 0.05


def test_several_seeds_are_paired_each_with_its_own_full_run() -> None:
    arms = {FULL: [rows(1.0, 1.0, 0.0), rows(0.5, 0.5, 0.5)], "drop": [rows(1.0, 0.0, 0.0), rows(0.0, 0.5, 0.0)]}
    found = compare(arms, 2000)
    drop = found["rows"][1]["minus_full"]
    assert (found["n"], found["seeds"]) == (6, 2)
    assert drop["mean"] == pytest.approx(-1 / 3)  # -1/3 and -1/3

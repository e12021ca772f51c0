"""The tables of `make gain` on run folders written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jointrag.lab.gain import AGENTS, report, runs_of, warm_report

N = 200


def write(out: Path, **f1: float) -> None:
    """A run whose variants answer the first `f1` of N questions right and the rest wrong."""
    out.mkdir(parents=True)
    rows = [{"variant": v, "f1": float(i < round(x * N))} for v, x in f1.items() for i in range(N)]
    (out / "eval.rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def gain(root: Path, after: float = 0.8, retriever: float = 0.7, bank: float = 0.2, doubled: float = 0.51) -> None:
    for seed in (1, 2):
        out = root / f"{seed}"
        write(out, before=0.5, sft_more=0.52, after=after, ceiling=0.9)
        bank_gain = {"mean": bank, "interval": [bank - 0.05, bank + 0.05]}
        (out / "eval.json").write_text(json.dumps({"held_out_bank": {"after_minus_before": {"f1": bank_gain}}}))
        check = dict.fromkeys(AGENTS, 0.6) | {"given gold": 0.9, "warm": 0.5, "doubled": doubled - 0.01 * (seed == 2)}
        (out / "warm_check.json").write_text(json.dumps(check))
        for a in AGENTS:
            write(root / f"{seed}-{a}", after=retriever if a == "retriever" else 0.55)


def test_a_gain_over_every_bar_passes_with_its_figures(tmp_path: Path) -> None:
    gain(tmp_path)
    text, ok = report(tmp_path, [1, 2])
    assert ok and "MISSED" not in text
    assert "| 1 | 0.500 | 0.520 | 0.800 | 0.900 | 0.700 | +0.300 [" in text  # best single: the retriever
    assert "| 0.75 |" in text  # (0.8 - 0.5) / (0.9 - 0.5)
    assert "joint - only retriever, seeds and questions: +0.100" in text
    warm, fair = warm_report(tmp_path, [1, 2])
    assert fair and "| 1 | 0.500 | +0.010 | 0.900 | +0.100 |" in warm
    assert "| mean |  | +0.005 | 0.900 |" in warm


@pytest.mark.parametrize(
    "missed",
    [{"after": 0.65}, {"retriever": 0.78}, {"bank": 0.04}, {"bank": 0.09}],
    ids=["gain", "single", "bank at 0", "bank"],
)
def test_one_missed_bar_fails_the_gain(tmp_path: Path, missed: dict[str, float]) -> None:
    gain(tmp_path, **missed)
    text, ok = report(tmp_path, [1, 2])
    assert not ok and "MISSED" in text


def test_a_warm_start_that_more_steps_would_move_is_not_fair(tmp_path: Path) -> None:
    gain(tmp_path, doubled=0.53)
    text, fair = warm_report(tmp_path, [1, 2])
    assert not fair and "| mean |  | +0.025 MISSED |" in text


def test_runs_differ_from_the_demo_only_in_what_they_compare(tmp_path: Path) -> None:
    runs = runs_of(7, tmp_path, ["warm_start.steps=60"])
    assert list(runs) == ["", "doubled", *AGENTS]
    own = [f"out={tmp_path / '7'}", "seed=7", "data.world.seed=7", "warm_start.steps=60"]
    assert runs[""].command()[3:] == ["train", "demo", *own, "--resume"]
    assert (runs[""].ready, runs[""].processes) == (True, 2)
    single = runs["filter"]
    assert not single.ready  # before the joint run's warm start
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "warm.json").write_text('{"form": "title"}')
    assert (single.ready, single.processes) == (True, 1)
    frozen = [x for x in single.command() if x.endswith("mode=frozen")]
    assert frozen == [f"agents.{a}.mode=frozen" for a in ("rewriter", "retriever", "answerer")]
    assert "warm_start.forms=title" in single.command()
    doubled = runs["doubled"].command()
    assert doubled.index("warm_start.steps=60") < doubled.index("warm_start.steps=120")

"""Runs side by side, as lines of shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from jointrag.data.errors import JointragError
from jointrag.lab.runs import Run, run_all, train_command


def shell(out: Path, line: str, after: Path | None = None, processes: int = 1) -> Run:
    return Run(out, lambda: ["sh", "-c", line], after, processes)


def test_a_training_is_started_so_that_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = train_command("demo", tmp_path / "run", ["seed=3"])
    assert command[1:] == ["-m", "jointrag.cli", "train", "demo", f"out={tmp_path / 'run'}", "seed=3", "--resume"]


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "eval.json").write_text("{}")
    run_all([shell(tmp_path / "1", "exit 3")], 1)


def test_a_failed_run_stops_the_others_with_its_last_words(tmp_path: Path) -> None:
    slow = shell(tmp_path / "slow", f"sleep 5; touch {tmp_path / 'ended'}")
    with pytest.raises(JointragError, match="broken failed with exit code 3:\noh no"):
        run_all([slow, shell(tmp_path / "broken", "echo oh no; exit 3")], 2)
    assert not (tmp_path / "ended").exists()


def test_no_more_processes_run_than_allowed_and_some_wait_for_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "1" / "warm.json"
    large = shell(tmp_path / "1", f"sleep 0.2; touch {there}; sleep 1", processes=2)
    run_all([large, shell(tmp_path / "2", "true", after=there), shell(tmp_path / "3", "true", processes=2)], 2)
    told = capsys.readouterr().err.splitlines()
    assert told == [f"{what} {name}" for name in "123" for what in ("started", "finished")]


def test_a_run_larger_than_what_is_allowed_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all([shell(tmp_path / "1", "true", processes=2), shell(tmp_path / "2", "true", processes=2)], 1)
    assert capsys.readouterr().err.count("finished") == 2

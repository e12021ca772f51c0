"""Runs on a local Ray cluster, a killed worker included."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jointrag.data.errors import JointragError
from jointrag.lab.ray_runner import run_all
from jointrag.lab.runs import Run

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'jointrag[ray]'")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One local cluster of two cores for all tests: starting one takes seconds."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def python(out: Path, code: str, after: Path | None = None) -> Run:
    return Run(out, lambda: [sys.executable, "-c", code], after)


def test_runs_go_to_the_cluster_and_some_wait_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "1" / "warm.json"
    first = python(tmp_path / "1", f"open({str(there)!r}, 'w').close()")
    run_all([python(tmp_path / "2", "print('hello')", after=there), first], 2)
    told = capsys.readouterr().err.splitlines()
    assert told == ["sent 1", "finished 1", "sent 2", "finished 2"]
    assert (tmp_path / "2" / "log.txt").read_text() == "hello\n"


def test_what_is_done_is_not_sent_again(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "eval.json").write_text("{}")
    run_all([python(tmp_path / "1", "raise SystemExit(3)")], 2)


def test_a_failed_run_ends_all_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(JointragError, match=r"1 failed with exit code 3:\noh no"):
        run_all([python(tmp_path / "1", "print('oh no', flush=True); raise SystemExit(3)")], 2)


def test_a_run_whose_worker_is_killed_is_begun_again(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = (
        "import os, signal, time, pathlib\n"
        f"p = pathlib.Path({str(begun)!r})\n"
        "n = int(p.read_text()) if p.exists() else 0\n"
        "p.write_text(str(n + 1))\n"
        "if n == 0:\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    time.sleep(60)\n"
        f"pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    )
    run_all([python(tmp_path / "1", code)], 2)
    assert begun.read_text() == "2" and (tmp_path / "done").exists()

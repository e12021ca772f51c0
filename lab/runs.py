"""Runs: many trainings side by side, as processes of this machine; each resumes, and what is done is not done again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jointrag.data.errors import JointragError

ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # of each process: one thread


@dataclass(frozen=True)
class Run:
    """One training. `command` is asked for when it starts; `after`: a file that has to be there first."""

    out: Path
    command: Callable[[], list[str]]
    after: Path | None = None
    processes: int = 1  # how many it keeps busy

    @property
    def done(self) -> bool:
        """True where its figures are there."""
        return (self.out / "eval.json").exists()

    @property
    def ready(self) -> bool:
        """True where it may start."""
        return self.after is None or self.after.exists()


def train_command(config: str, out: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command that trains a config into `out`, or goes on with it."""
    return [sys.executable, "-m", "jointrag.cli", "train", config, f"out={out}", *overrides, "--resume"]


def failed(run: Run, code: int) -> JointragError:
    """Return what ends everything: a run's exit code and its last words."""
    tail = (run.out / "log.txt").read_text(errors="replace").splitlines()[-5:]
    return JointragError(f"{run.out.name} failed with exit code {code}:\n" + "\n".join(tail))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies: two processes must never write one run folder."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_all(runs: Sequence[Run], workers: int) -> None:
    """Run what is not done on `workers` processes of one thread each; a failed one stops all with its last words."""
    env = os.environ | ENV
    waiting = [run for run in runs if not run.done]
    running: dict[Run, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            free = workers - sum(run.processes for run in running)
            fits = [run for run in waiting if run.ready and (run.processes <= free or not running)]
            if fits:
                run = fits[0]
                waiting.remove(run)
                run.out.mkdir(parents=True, exist_ok=True)
                with (run.out / "log.txt").open("ab") as log:
                    running[run] = subprocess.Popen(
                        run.command(), stdout=log, stderr=log, env=env, preexec_fn=die_with_parent
                    )
                print(f"started {run.out.name}", file=sys.stderr, flush=True)
                continue
            time.sleep(1)
            for run, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                if process.returncode:
                    raise failed(run, process.returncode)
                print(f"finished {run.out.name}", file=sys.stderr, flush=True)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()

"""The same runs on a Ray cluster (`--runner ray`, extra `ray`): each run a task, begun anew where its worker dies.

The cluster is that of RAY_ADDRESS, or one that runs here, or a local one started for this. Every node must see the run
folders under the same path: a run that lost its worker resumes from its checkpoint there.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jointrag.data.errors import ConfigError, JointragError
from jointrag.lab.runs import ENV, Run, die_with_parent, failed

RETRIES = 3  # workers a run may lose
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def run_all(runs: Sequence[Run], workers: int) -> None:
    """Run what is not done, as many at a time as the cluster has cores; a failed run stops all with its last words.

    workers: cores of the cluster that is started where RAY_ADDRESS names none.
    """
    try:
        import ray
    except ImportError as e:
        raise ConfigError('--runner: got ray, which is not installed: pip install "jointrag[ray]"') from e
    own = not ray.is_initialized() and not _joined(ray)
    if own:
        most = max([workers, *(run.processes for run in runs)])
        ray.init(num_cpus=most, include_dashboard=False, **QUIET)
    work = ray.remote(_work)
    waiting = [run for run in runs if not run.done]
    running: dict[Any, Run] = {}
    try:
        while waiting or running:
            for run in [run for run in waiting if run.ready]:
                waiting.remove(run)
                run.out.mkdir(parents=True, exist_ok=True)
                options = {"num_cpus": run.processes, "max_retries": RETRIES}
                task = work.options(**options).remote(run.command(), str((run.out / "log.txt").resolve()), os.getcwd())
                running[task] = run
                print(f"sent {run.out.name}", file=sys.stderr, flush=True)
            ready, _ = ray.wait(list(running), timeout=1.0)
            for task in ready:
                run = running.pop(task)
                try:
                    code = ray.get(task)
                except ray.exceptions.RayError as e:
                    raise JointragError(f"{run.out.name} lost {RETRIES + 1} workers, the last with {e}") from e
                if code:
                    raise failed(run, code)
                print(f"finished {run.out.name}", file=sys.stderr, flush=True)
    finally:
        for task in running:
            ray.cancel(task, force=True)
        if own:
            ray.shutdown()


def _joined(ray: Any) -> bool:
    """Join the cluster of RAY_ADDRESS, or one that runs on this machine; False where there is none."""
    try:
        ray.init(address="auto", **QUIET)
    except ConnectionError:
        if "RAY_ADDRESS" in os.environ:
            raise
        return False
    return True


def _work(command: list[str], log: str, folder: str) -> int:
    """Run a command on a worker; return its exit code. A worker that is killed takes the command with it."""
    with Path(log).open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | ENV, cwd=folder, preexec_fn=die_with_parent
        )
        return process.wait()

"""The same seed gives the same bytes: twice, and after a SIGKILL at any moment; broken or foreign runs are refused."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jointrag.data.errors import CheckpointError, StorageError
from jointrag.marl.trainer import save_heads

SETTINGS = (
    "warm_start.steps=2", "warm_start.batch=8", "warm_start.questions=8", "warm_start.lr=0.02",
    "warm_start.forms=title", "graph.max_hops=1", "marl.updates=3", "marl.episodes_per_update=4", "marl.minibatch=8",
    "marl.critic.warm_up=1", "marl.epochs=1", "eval.every=2", "eval.questions=2",
)  # fmt: skip


class Worker:
    """The process that trains for us."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("resume_worker.py")), *SETTINGS],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def train(self, out: Path, resume: bool = False, kill_after: float | None = None) -> int:
        """Train into `out`, killed after so many seconds; returns the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{out} {'resume' if resume else 'new'}\n")
        self.process.stdin.flush()
        pid = int(self.answer())
        if kill_after is None:
            return int(self.answer())

        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(kill_after, kill)
        timer.start()
        status = int(self.answer())
        timer.cancel()
        return status


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    w = Worker()
    yield w
    assert w.process.stdin is not None
    w.process.stdin.close()
    w.process.wait()
    assert w.process.stdout is not None
    w.process.stdout.close()


@pytest.fixture(scope="module")
def undisturbed(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """Two runs nobody disturbed, and the seconds the faster one took."""
    seconds, outs = [], [tmp_path_factory.mktemp("undisturbed") / "run" for _ in range(2)]
    for out in outs:
        clock = time.perf_counter()
        assert worker.train(out) == 0
        seconds.append(time.perf_counter() - clock)
    return outs[0], outs[1], min(seconds)


def outcome(out: Path) -> dict[str, bytes]:
    """The bytes that must not depend on what happened on the way."""
    names = ["metrics.jsonl", "training.json", "graph.mermaid"]
    heads = [str(p.relative_to(out)) for p in sorted((out / "heads").rglob("*")) if p.is_file()]
    assert len(heads) > 12
    return {name: (out / name).read_bytes() for name in [*names, *heads]}


def test_the_same_seed_gives_the_same_bytes_twice(undisturbed: tuple[Path, Path, float]) -> None:
    assert outcome(undisturbed[0]) == outcome(undisturbed[1])
    assert outcome(undisturbed[0])["metrics.jsonl"].count(b"\n") == 3


@pytest.mark.parametrize(
    "settings",
    [
        ("marl.budget={searches: 0.5, rate: 0.2, ramp: 2}",),
        ("marl.credit=group_relative", "marl.group=2"),
        ("marl.credit=difference", "marl.budget={searches: 0.5}"),
        ("marl.credit=shapley", "agents.retriever.mode=frozen"),
        ("marl.rollback=2", "agents.filter.lr=1.0e+30"),
        ("marl.normalise=all", "llm.heads=shared"),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_what_a_setting_keeps_of_past_updates_is_kept_in_a_stopped_run(
    trainer: Callable[..., Any], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    whole = trainer(tmp_path / "whole", *settings)
    whole.train()
    stopped = trainer(tmp_path / "stopped", *settings)

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    stopped.on_update = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer(tmp_path / "stopped", *settings, resume=True).train()
    one, other = (outcome(tmp_path / name) for name in ("whole", "stopped"))
    assert one == other
    if settings[0] == "marl.rollback=2":
        assert b"rolled_back" in one["metrics.jsonl"].splitlines()[0]


def test_another_process_gives_the_same_bytes(
    undisturbed: tuple[Path, Path, float], pipe: Callable[..., Any], small: Any, tmp_path: Path
) -> None:
    """This one, with another hash seed and whatever ran before."""
    from jointrag.configs.load import load_config
    from jointrag.data.world import Mix, QuestionMaker
    from jointrag.graph.declare import declare_config
    from jointrag.marl.trainer import Trainer

    config = load_config({"data": {"world": {}}}, SETTINGS)
    declared = declare_config(config)
    pipeline = pipe(
        declared.graph, declared.agents, max_hops=1, evidence_written=declared.evidence_written,
        recursion_limit=declared.recursion_limit,
    )  # fmt: skip
    questions = QuestionMaker(small.world, (0, 1, 2), 0).make(30, Mix(), "q")
    Trainer(pipeline, questions[:24], questions[24:], config=config, out=tmp_path / "run").train()
    assert outcome(tmp_path / "run") == outcome(undisturbed[0])


@pytest.mark.parametrize("fifth", range(5))
def test_a_run_killed_at_a_random_moment_and_resumed_gives_the_same_bytes(
    fifth: int, worker: Worker, undisturbed: tuple[Path, Path, float], tmp_path: Path
) -> None:
    at = random.SystemRandom().uniform(fifth, fifth + 1) / 5 * undisturbed[2]
    print(f"killed after {at:.3f} of {undisturbed[2]:.3f} s")
    status = worker.train(tmp_path / "run", kill_after=at)
    assert status in (-signal.SIGKILL, 0)  # a fast run may be over before
    assert worker.train(tmp_path / "run", resume=True) == 0
    assert outcome(tmp_path / "run") == outcome(undisturbed[0])


# runs stopped from within, at the moments a timer hardly meets


@pytest.fixture(scope="module")
def half(trainer: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after its first update's checkpoint."""
    out = tmp_path_factory.mktemp("half") / "run"
    stop_after(trainer(out, *QUICK), 1)
    return out


QUICK = ("warm_start.steps=0", "marl.episodes_per_update=4", "marl.epochs=1", "eval.questions=2", "graph.max_hops=1")


class Stopped(Exception):
    """Not an error of ours."""


def stop_after(t: Any, update: int) -> None:
    """Train until the checkpoint of `update`, and no further."""
    on_update = t.on_update

    def stop(record: Any) -> None:
        on_update(record)
        if record["update"] == update:
            raise Stopped

    t.on_update = stop
    with pytest.raises(Stopped):
        t.train()


@pytest.fixture
def copied(half: Path, tmp_path: Path) -> Path:
    """A copy of the half run, to be spoilt."""
    return Path(shutil.copytree(half, tmp_path / "run"))


def go_on(trainer: Callable[..., Any], out: Path, *settings: str) -> Any:
    return trainer(out, *QUICK, *settings, resume=True)


def test_a_line_logged_without_its_checkpoint_is_written_again(
    copied: Path, half: Path, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    with (copied / "metrics.jsonl").open("a") as f:
        f.write('{"update": 2, "half a li')
    (copied / "checkpoint" / "state.pt.tmp").write_bytes(b"half a checkpoint")
    result = go_on(trainer, copied).train()
    assert [r["update"] for r in result.metrics] == [1, 2]
    go_on(trainer, Path(shutil.copytree(half, tmp_path / "other"))).train()
    assert outcome(copied) == outcome(tmp_path / "other")


def test_a_finished_run_resumed_does_nothing_again(copied: Path, trainer: Callable[..., Any]) -> None:
    go_on(trainer, copied).train()
    before = outcome(copied)
    assert go_on(trainer, copied).train().best_update in (0, 1, 2)
    assert outcome(copied) == before


def test_a_run_folder_in_use_is_not_overwritten(copied: Path, trainer: Callable[..., Any]) -> None:
    before = (copied / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"holds a run already.*--resume"):
        trainer(copied, *QUICK).train()
    assert (copied / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("setting", ["seed=1", "marl.updates=3", "agents.filter.mode=frozen", "marl.clip=0.3"])
def test_a_checkpoint_of_another_config_is_refused(setting: str, copied: Path, trainer: Callable[..., Any]) -> None:
    with pytest.raises(CheckpointError, match="another config"):
        go_on(trainer, copied, setting).train()


def test_a_checkpoint_of_other_questions_is_refused(copied: Path, trainer: Callable[..., Any]) -> None:
    from dataclasses import replace

    t = go_on(trainer, copied)
    t.train_questions[0] = replace(t.train_questions[0], answers=("Zal Hill",))  # the same text, another answer
    with pytest.raises(CheckpointError, match="questions"):
        t.train()


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "foreign"])
def test_a_damaged_checkpoint_is_refused(damage: str, copied: Path, trainer: Callable[..., Any]) -> None:
    path = copied / "checkpoint" / "state.pt"
    data = path.read_bytes()
    if damage == "foreign":
        torch.save({"weights": torch.zeros(2)}, path)
    else:
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "garbage": b"no checkpoint" * 99}[damage])
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        go_on(trainer, copied).train()


def test_a_run_that_lost_its_metrics_is_refused(copied: Path, trainer: Callable[..., Any]) -> None:
    (copied / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        go_on(trainer, copied).train()


# storage


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: what a write meets on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_run_and_the_last_checkpoint_still_loads(
    copied: Path, half: Path, trainer: Callable[..., Any], tmp_path: Path
) -> None:
    size = (copied / "checkpoint" / "state.pt").stat().st_size
    t = go_on(trainer, copied)
    with full_disk(size // 2), pytest.raises(StorageError, match=r"checkpoint cannot be written.*--resume"):
        t.train()
    assert (copied / "checkpoint" / "state.pt").stat().st_size == size
    assert [r["update"] for r in go_on(trainer, copied).train().metrics] == [1, 2]
    go_on(trainer, Path(shutil.copytree(half, tmp_path / "other"))).train()
    assert outcome(copied) == outcome(tmp_path / "other")


def test_heads_that_do_not_fit_on_the_disk_are_a_storage_error(copied: Path, trainer: Callable[..., Any]) -> None:
    t = go_on(trainer, copied)
    t.train()
    with full_disk(4096), pytest.raises(StorageError, match="cannot be written"):
        save_heads(t.pipeline, t.out / "again")


def test_metrics_that_do_not_fit_on_the_disk_are_a_storage_error(copied: Path, trainer: Callable[..., Any]) -> None:
    t = go_on(trainer, copied)
    with full_disk((copied / "metrics.jsonl").stat().st_size + 1), pytest.raises(StorageError, match=r"metrics\.jsonl"):
        t._log("metrics.jsonl", {"update": 2})


def test_a_place_that_cannot_hold_a_folder_is_refused_before_anything_is_spent(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    t = trainer(tmp_path / "file" / "run")
    monkeypatch.setattr(t, "_warm_start", lambda: pytest.fail("spent"))
    with pytest.raises(StorageError, match="cannot be written"):
        t.train()


def test_a_read_only_folder_is_refused_before_anything_is_spent(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        t = trainer(Path(folder) / "run")
        monkeypatch.setattr(t, "_warm_start", lambda: pytest.fail("spent"))
        with nobody(), pytest.raises(StorageError, match="writable"):
            t.train()
        Path(folder).chmod(0o700)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Be somebody who may not write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

AGENTS = ("rewriter", "retriever", "filter", "answerer")
# a fifth of a second an update: enough decisions of every agent, and a warm start hard enough that texts end
TINY = (
    "warm_start.steps=6", "warm_start.batch=12", "warm_start.questions=16", "warm_start.lr=0.02",
    "warm_start.forms=title", "graph.max_hops=2", "marl.updates=2", "marl.episodes_per_update=8",
    "marl.minibatch=16", "marl.critic.warm_up=1", "eval.every=1", "eval.questions=4",
)  # fmt: skip


@dataclass
class Log:
    """What the hooks of a training saw: head hashes after the warm start and after each update, and the records."""

    hashes: list[dict[str, str]] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="session", autouse=True)
def _little_garbage() -> None:
    """Keep what is imported out of garbage collection: accelerate collects after each supervised training."""
    import jointrag.marl.sft
    import jointrag.marl.trainer  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture
def log() -> Log:
    """An empty log."""
    return Log()


@pytest.fixture(scope="session")
def trainer(small: Any, pipe: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer of the four agents on a toy model and the small world; `log` follows it."""

    def build(out: Path, *settings: str, log: Log | None = None, pipeline: Any = None, **options: Any) -> Any:
        from jointrag.configs.load import load_config
        from jointrag.marl.trainer import Trainer

        config = load_config({"data": {"world": {}}}, [*TINY, *settings])
        pipeline = pipeline or pipe(max_hops=config.graph.max_hops)
        heads = pipeline.llm.heads

        def hashes() -> None:
            if log is not None:
                log.hashes.append({h: heads.hash(h) for h in heads.names if "@" not in h})

        def on_update(record: Mapping[str, Any]) -> None:
            hashes()
            if log is not None:
                log.records.append(record)

        return Trainer(
            pipeline, small.questions[:24], small.questions[24:30], config=config, out=out,
            on_update=on_update, after_warm_start=lambda _: hashes(), **options,
        )  # fmt: skip

    return build


@dataclass(frozen=True)
class Trained:
    """A finished training of two updates."""

    trainer: Any
    result: Any
    log: Log


@pytest.fixture(scope="session")
def trained(trainer: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trained once for all tests that only look."""
    log = Log()
    t = trainer(tmp_path_factory.mktemp("trained") / "run", log=log)
    return Trained(t, t.train(), log)


@pytest.fixture(scope="session")
def warmed(
    trainer: Callable[..., Any], trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Any, Any]]:
    """A fresh learner on the warm heads of `trained`, and its trainer: (trainer, learner)."""
    heads = trained.trainer.pipeline.llm.heads
    states = {h: heads.state(f"{h}@warm") for h in AGENTS}

    def build(*settings: str, pipeline: Any = None) -> tuple[Any, Any]:
        from jointrag.marl.learner import Learner

        t = trainer(tmp_path_factory.mktemp("warmed"), *settings, pipeline=pipeline)
        own = t.pipeline.llm.heads
        for h, state in states.items():
            own.set_state(h, state)
            own.copy(h, f"{h}@warm")
        return t, Learner(t.pipeline, t.config, t.rewards, t.algorithm)

    return build


@pytest.fixture(scope="session")
def rollout() -> Callable[..., Sequence[Any]]:
    """Sampled, scored episodes of a trainer's first update."""

    def of(t: Any, seed: int = 5) -> Sequence[Any]:
        episodes: Sequence[Any] = t._rollout(1, seed)
        for e in episodes:
            t.rewards.score(e, 0)
        return episodes

    return of

"""Cost: what trainings will take on one core of this machine, from two small ones timed now.

    warm start   labels + steps x a step         both from two lengths, so that what is paid once is not scaled
    an update    episodes x (rollouts an episode x a rollout + learning)
    evaluation   (looks at dev x its questions + held-out questions) x a rollout

Rollouts an episode: 1, and one for each learning agent under `credit: difference`, one for each coalition under
`shapley`. Configs that differ in nothing but rewards, modes, credit and lengths are timed once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from jointrag.configs.schema import Config
from jointrag.graph.declare import declare_config
from jointrag.marl.credit.shapley import EXACT, ORDERS

EPISODES = 32  # of the update that is timed
STEPS = (2, 6)  # of the warm starts that are timed


@dataclass(frozen=True)
class Speed:
    """Seconds on one core."""

    labels: float
    step: float
    rollout: float  # an episode
    learn: float  # an episode and epoch


def seconds_of(configs: Sequence[Config]) -> list[float]:
    """Return the seconds one run of each config takes on one core; the first one's warm start serves the others."""
    alike = [str(config.model_dump(include={"data", "index", "llm", "graph"})) for config in configs]
    speeds: dict[str, Speed] = {}
    for key, config in zip(alike, configs, strict=True):
        if key not in speeds:
            speeds[key] = measure(config)
    return [
        estimate(config, speeds[key], shares=n > 0 and key == alike[0])
        for n, (key, config) in enumerate(zip(alike, configs, strict=True))
    ]


def estimate(config: Config, speed: Speed, shares: bool = False) -> float:
    """Return the seconds of one run. shares: it takes the warm start of another."""
    m, e, w = config.marl, config.eval, config.warm_start
    start = 0.0 if shares or w.run or not w.steps else speed.labels + w.steps * speed.step
    replays = _replays(config)
    episodes = m.updates * m.episodes_per_update
    answered = (m.updates // e.every + 1) * e.questions + e.test_questions
    return start + episodes * ((1 + replays) * speed.rollout + m.epochs * speed.learn) + answered * speed.rollout


def _replays(config: Config) -> int:
    players = sum(config.agent(name).mode == "learn" for name in declare_config(config).names)
    if config.marl.credit == "difference":
        return players
    if config.marl.credit == "shapley":
        return int(2**players - 1 if players <= EXACT else ORDERS * players)
    return 0


def measure(config: Config) -> Speed:
    """Train for a moment, twice, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        (short, rollout, learn), (long, *_) = (_time(config, steps) for steps in STEPS)
    finally:
        torch.set_num_threads(threads)
    step = max(0.0, long - short) / (STEPS[1] - STEPS[0])
    return Speed(max(0.0, short - STEPS[0] * step), step, rollout, learn)


def _time(config: Config, steps: int) -> tuple[float, float, float]:
    """Return the seconds of a warm start, of one rollout, and of learning from one episode once."""
    from jointrag.marl.run import prepare
    from jointrag.marl.trainer import Trainer

    m, w = config.marl, config.warm_start
    size = min(EPISODES, m.episodes_per_update)
    small = config.model_copy(
        update={
            "warm_start": w.model_copy(update={"steps": min(steps, w.steps), "questions": min(30, w.questions)}),
            "marl": m.model_copy(
                update={"updates": 1, "episodes_per_update": size, "group": 1, "epochs": 1, "credit": "team_gae"}
            ),
            "eval": config.eval.model_copy(update={"questions": 1, "every": 1}),
        }
    )
    job = prepare(small)
    with tempfile.TemporaryDirectory() as out:
        Trainer(job.pipeline, job.data.train, job.data.dev or None, config=small, out=out).train()
        clock = [json.loads(x) for x in (Path(out) / "timing.jsonl").read_text(encoding="utf-8").splitlines()]
    warm = next(float(c["seconds"]) for c in clock if c.get("what") == "warm_start")
    update = next(c for c in clock if "update" in c)
    return warm, update["rollout_s"] / size, update["update_s"] / size

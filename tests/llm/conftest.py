from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from jointrag.data.types import Passage
from jointrag.llm.actions import FreeText, Queries, Ranking, Select
from jointrag.llm.model import LanguageModel
from jointrag.llm.scheduler import Scheduler
from jointrag.llm.toy import toy_model
from jointrag.llm.types import Candidates, Observation, Request

ACTIONS: dict[str, Any] = {
    "rewriter": Queries(2, 12),
    "filter": Select(3),
    "answerer": FreeText(9),
    "retriever": Ranking(3),
    "summariser": FreeText(6),  # a user's own agent
}
DIM = 6  # of candidate vectors
WORDS = "the person who lives in this place and works there for years Bonu Song Bane Dofu 1901".split()


def randomise(lm: LanguageModel, head: str, seed: int = 0, size: float = 0.15) -> None:
    """Give a head weights that change what the trunk says."""
    g = torch.Generator().manual_seed(seed)
    lm.heads.set_state(head, {k: torch.randn(v.shape, generator=g) * size for k, v in lm.heads.state(head).items()})


@pytest.fixture(scope="session")
def build() -> Callable[..., LanguageModel]:
    """A toy model with one trained-looking head for each of ACTIONS."""

    def of(**options: Any) -> LanguageModel:
        lm = toy_model(**options)
        for i, agent in enumerate(ACTIONS):
            lm.heads.add(agent, {"projection": (DIM, 32)} if agent == "retriever" else None)
            randomise(lm, agent, seed=i)
        return lm

    return of


def observation(rng: random.Random) -> Observation:
    def said(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    return Observation(
        question=said(3, 9),
        passages=tuple(Passage(str(i), said(2, 2), said(3, 12)) for i in range(rng.randint(0, 5))),
        trail=tuple(said(1, 4) for _ in range(rng.randint(0, 3))),
        notes=(("summary", said(1, 4)),) if rng.random() < 0.3 else (),
        instruction="say it",
    )


@pytest.fixture(scope="session")
def ask() -> Callable[..., list[Request]]:
    """`count` requests of mixed agents and lengths."""

    def of(
        lm: LanguageModel,
        count: int = 30,
        *,
        agents: tuple[str, ...] = tuple(ACTIONS),
        sample: bool = True,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> list[Request]:
        rng = random.Random(seed)
        scheduler = Scheduler(lm, None, {a: a for a in ACTIONS}, dict.fromkeys(ACTIONS, temperature))  # type: ignore[arg-type]
        out = []
        for i in range(count):
            agent, candidates = agents[i % len(agents)], None
            if agent == "retriever":
                n = rng.randint(2, 7)
                numbers = np.random.default_rng(rng.randrange(10**6))
                legal = [True, True, *(rng.random() < 0.7 for _ in range(n - 2))]
                vectors = numbers.normal(size=(n, DIM)).astype(np.float32)
                scores = -np.sort(-numbers.normal(size=n)).astype(np.float32)
                candidates = Candidates(tuple(f"c{j}" for j in range(n)), scores, vectors, tuple(legal))
            request, _ = scheduler.request(
                agent, "learn", observation(rng), ACTIONS[agent], (seed, i, 0, agent),
                candidates=candidates, sample=sample, seed=seed,
            )  # fmt: skip
            out.append(request)
        return out

    return of

"""A reward term: a small frozen pydantic model whose fields are its YAML keys and which scores finished episodes.

The contract, held by a test over both registries: a term is a pure function of the episode (it changes nothing, draws
nothing, gives the same number twice), picklable, and bounded: |value| <= 1 before its weight.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from jointrag.graph.episode import Episode


class TeamTerm(BaseModel):
    """One number for the outcome of an episode, shared by all agents."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def score_episode(self, episode: Episode) -> float:
        """Return the value of this episode."""
        raise NotImplementedError(f"{type(self).__name__}.score_episode(episode): return a float within [-1, 1]")


class ProcessTerm(BaseModel):
    """One number for one decision, paid to the agent that made it.

    per_hop: True = its positive values are divided by the hop cap (a loop would farm them). False is for terms whose
    sum over an episode is at most 1 as they are: gains that telescope, and what is paid at most once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    per_hop: ClassVar[bool] = True

    def score_decision(self, episode: Episode, i: int) -> float:
        """Return the value of `episode.decisions[i]`."""
        raise NotImplementedError(f"{type(self).__name__}.score_decision(episode, i): return a float within [-1, 1]")

"""Centralised critic: one more head and a linear layer with two outputs, V for the team and b for the agent at hand.

It reads the actor's own context (cached) and then, in its suffix, the rest of the whole state: agent, hop, the other
agents' last actions, titles kept and dropped; `privileged` adds gold answer and gold titles (training only). A critic
on the actor's context alone would be a local one, which is what `local` gives (ippo).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from jointrag.graph.episode import Decision, Episode
from jointrag.llm.model import Chunk, LanguageModel
from jointrag.llm.types import Completion, Request
from jointrag.marl.losses import RunningStat

HEAD = "critic"
EMPTY = Completion((), (), ())


def said(decision: Decision) -> str:
    """Return a decision's action in a few words: titles for passages."""
    value = decision.value
    if isinstance(value, tuple):
        titles = {p.id: p.title for p in decision.received}
        return " , ".join(titles.get(v, str(v)) for v in value) or "none"
    return str(value) if value is not None else "default"


def whole_state(episode: Episode, i: int, privileged: bool, titles: dict[str, str]) -> list[tuple[str, str]]:
    """Return what decision `i`'s actor does not see, as (agent or "", text).

    Who acts at which hop; others' last actions; then, each after a semicolon, titles kept, titles dropped, and with
    `privileged` gold titles missing and the answer. Short on purpose: these tokens are most of what an update costs.
    """
    decision = episode.decisions[i]
    last: dict[str, Decision] = {}
    kept: dict[str, str] = {p.id: p.title for p in decision.held}
    dropped: dict[str, str] = {}
    for d in episode.decisions:
        if d.step < decision.step:
            if d.agent != decision.agent:
                last[d.agent] = d
            dropped = {p.id: p.title for p in d.update.get("passages", ())} or dropped
    told = ["".join(f" {t}" for t in kept.values())]
    away = [t for p, t in dropped.items() if p not in kept]
    shown = any("passages" in d.update for d in last.values())
    told.append("" if shown else "".join(f" {t}" for t in away))
    if privileged:
        gold = episode.question.supporting_ids
        missing = [titles.get(g, g) for g in gold if g not in kept]
        told += [f" {len(gold)}" + "".join(f" {t}" for t in missing), f" {episode.question.answers[0]}"]
    actions = [(name, said(d)) for name, d in last.items()]
    return [(decision.agent, str(decision.hop)), *actions, ("", "; " + " ;".join(told).strip())]


class Critic:
    """Values of decisions. `team` and `own` normalise the targets of V and b."""

    def __init__(self, llm: LanguageModel, index: Any, privileged: bool, local: bool) -> None:
        self.llm, self.index, self.privileged, self.local = llm, index, privileged, local
        self.team, self.own = RunningStat(0.95), RunningStat(0.95)

    def requests(self, episodes: Sequence[Episode]) -> tuple[list[tuple[Request, Completion]], list[tuple[int, int]]]:
        """Return what the critic reads for every decision with a context, and (episode, decision) of each."""
        acts, where = [], []
        for e, episode in enumerate(episodes):
            known = {i for i in episode.question.supporting_ids if i in self.index._row_of}
            titles = {p.id: p.title for p in self.index.passages(sorted(known))} if self.privileged else {}
            for i, decision in enumerate(episode.decisions):
                if decision.request is None:
                    continue
                state = [] if self.local else whole_state(episode, i, self.privileged, titles)
                suffix = self.llm.template.suffix(HEAD, "", state)
                request = Request(decision.request.key, HEAD, HEAD, decision.request.context, suffix)
                acts.append((request, EMPTY))
                where.append((e, i))
        return acts, where

    def forward(self, chunk: Chunk) -> torch.Tensor:
        """Return normalised (V, b) [B, 2]."""
        extra = self.llm.heads.extra[HEAD]
        hidden = self.llm.encode(chunk).float()
        return hidden @ extra["value"].T + extra["bias"]

    def scale(self, out: torch.Tensor) -> torch.Tensor:
        """Return (V, b) in units of reward."""
        std = torch.tensor([max(self.team.std, 0.05), max(self.own.std, 0.05)], device=out.device)
        return out * std + torch.tensor([self.team.mean, self.own.mean], device=out.device)

    def normalised(self, targets: torch.Tensor) -> torch.Tensor:
        """Return targets [B, 2] in the critic's own units."""
        std = torch.tensor([max(self.team.std, 0.05), max(self.own.std, 0.05)], device=targets.device)
        return (targets - torch.tensor([self.team.mean, self.own.mean], device=targets.device)) / std

    @torch.no_grad()
    def values(self, chunks: Sequence[Chunk], count: int) -> torch.Tensor:
        """Return (V, b) [count, 2] in units of reward."""
        out = torch.zeros((count, 2))
        for chunk in chunks:
            out[chunk.rows] = self.scale(self.forward(chunk)).cpu()
        return out

"""Learner: the joint update. Scores rollouts with critic and reference, gives credit, and moves every learning head.

Minibatches are random decisions of one head, packed by length; their contexts' keys and values are already there from
the rollout. Everything random is derived from (seed, update), so a resumed run repeats itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jointrag.data.errors import DivergedError
from jointrag.graph.episode import Decision, Episode
from jointrag.graph.pipeline import Pipeline
from jointrag.llm.model import Chunk
from jointrag.llm.types import Completion, Request
from jointrag.marl import losses
from jointrag.marl.budget import SearchBudget
from jointrag.marl.credit.base import Batch, Credit, Floats
from jointrag.marl.critic import HEAD as CRITIC
from jointrag.marl.critic import Critic
from jointrag.marl.health import behaviour, silence
from jointrag.marl.warm_start import optimizer_groups
from jointrag.rewards.build import RewardFunction

Act = tuple[Request, Completion]
ALL = "*"  # key of the statistics over all agents: no agent has that name
SLOWER = 0.1  # of its learning rate, for a head that was rolled back
LOGGED = ("n", "kl", "entropy", "clipped", "gradient")  # sums over decisions and epochs


@dataclass
class Sample:
    """One decision that trains, with all the update needs."""

    episode: int
    index: int
    decision: Decision
    act: Act
    advantage: float = 0.0
    reference: tuple[float, ...] = ()  # log-probs under the warm head, parallel to tokens


class Learner:
    """Holds optimisers, KL controllers, critic and running statistics of one training."""

    def __init__(self, pipeline: Pipeline, config: Any, rewards: RewardFunction, algorithm: Any) -> None:
        self.pipeline, self.config, self.rewards, self.algorithm = pipeline, config, rewards, algorithm
        m = config.marl
        self.settings = {a.name: config.agent(a.name) for a in pipeline.agents}
        self.learning = [a.name for a in pipeline.agents if a.trainable and config.agent(a.name).mode == "learn"]
        heads = list(dict.fromkeys(pipeline.head_of[n] for n in self.learning))
        self.critic = Critic(pipeline.llm, pipeline.index, m.critic.privileged, algorithm.local_critic)
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.base_lr: dict[str, list[float]] = {}
        for h in heads:
            mine = [self.settings[n] for n in self.learning if pipeline.head_of[n] == h]
            groups = optimizer_groups(
                pipeline, h, float(np.mean([a.lr for a in mine])), float(np.mean([a.projection_lr for a in mine]))
            )
            self.optimizers[h] = torch.optim.AdamW(groups, weight_decay=0.0)
        critic = list(pipeline.llm.heads.named(CRITIC).values())
        self.optimizers[CRITIC] = torch.optim.AdamW([{"params": critic, "lr": m.critic.lr}], weight_decay=0.0)
        for h, o in self.optimizers.items():
            self.base_lr[h] = [g["lr"] for g in o.param_groups]
        self.kl = {
            n: losses.KLController(k.beta, k.target, min(k.floor, k.beta))  # beta 0 = off
            for n, k in ((n, self.settings[n].kl) for n in self.learning)
        }
        self.spread = {n: losses.RunningStat() for n in (*self.learning, ALL)}
        self.budget = SearchBudget(m.budget) if m.budget else None
        self.episodes_done = 0

    # reading rollouts

    @torch.no_grad()
    def values(self, episodes: Sequence[Episode]) -> tuple[list[Act], list[tuple[int, int]], np.ndarray[Any, Any]]:
        """Return what the critic reads, (episode, decision) of its rows, and (V, b) [rows, 2]."""
        acts, where = self.critic.requests(episodes)
        values = self.critic.values(self.pipeline.llm.chunks(acts), len(acts))
        return acts, where, values.numpy().astype(float)

    def minibatches(self, acts: Sequence[Act], seed: int) -> list[list[Chunk]]:
        """Return minibatches: random decisions of one head, `marl.minibatch` at most, in chunks of like length.

        Minibatches of like length would each hold one kind of decision (all stops, say), and push it up or down alone.
        """
        rows: dict[str, list[int]] = {}
        for row, (request, _) in enumerate(acts):
            rows.setdefault(request.head or "", []).append(row)
        rng, out = np.random.default_rng((seed, 2)), []
        for mine in rows.values():
            for part in np.array_split(rng.permutation(mine), math.ceil(len(mine) / self.config.marl.minibatch)):
                chunks = self.pipeline.llm.chunks([acts[row] for row in part], size=len(part))
                out.append([replace(c, rows=[int(part[r]) for r in c.rows]) for c in chunks])
        return out

    def score(self, episodes: Sequence[Episode], episodes_done: int) -> None:
        """Fill in rewards; a reward that is no finite number stops the run with the term named."""
        self.episodes_done = episodes_done  # replays of these episodes are weighed alike
        self._score(episodes)

    def _score(self, episodes: Sequence[Episode]) -> None:
        for e in episodes:
            self.rewards.score(e, self.episodes_done)
        if self.budget:
            self.budget.charge(episodes)

    def credit(
        self,
        episodes: Sequence[Episode],
        where: Sequence[tuple[int, int]],
        values: np.ndarray[Any, Any],
        replays: bool = True,
    ) -> list[Credit]:
        """Return credit of every decision of every episode, in the algorithm's way.

        replays: False where only the critic's targets are wanted: nothing is run again.
        """
        seen: list[dict[int, tuple[float, float]]] = [{} for _ in episodes]
        for (e, i), (v, b) in zip(where, values, strict=True):
            seen[e][i] = (float(v), float(b))
        team, own = [], []
        for e, episode in enumerate(episodes):
            first = min(seen[e], default=None)
            below = first is not None and self.rewards.apply_value_guard(episode, seen[e][first][0])
            known = sorted(seen[e])
            vb = []
            for i in range(len(episode.decisions)):  # a decision without a critic input takes its predecessor's value
                before = [k for k in known if k <= i]
                vb.append(seen[e][before[-1] if before else known[0]] if known else (0.0, 0.0))
            team.append([v for v, _ in vb])
            mean = [self.rewards.baseline(episode, i, self.episodes_done, below) for i in range(len(vb))]
            own.append([b if m is None else m for (_, b), m in zip(vb, mean, strict=True)])

        rewards = np.array([sum(e.team.values()) for e in episodes], dtype=float)

        def replay(absent: frozenset[str]) -> Floats:
            return self.replay(episodes, rewards, absent) if replays else rewards

        batch = Batch(episodes, team, own, frozenset(self.learning), replay)
        out: list[Credit] = self.algorithm.credit(batch, self.config.marl)
        return out

    @property
    def spare(self) -> tuple[float, int]:
        """Which plans of this update's rollouts are made to ask nothing, as `Pipeline.run` takes it."""
        return self.budget.spare if self.budget else (0.0, 0)

    def replay(self, episodes: Sequence[Episode], rewards: Floats, absent: frozenset[str]) -> Floats:
        """Return the team rewards of episodes run again with `absent` agents at their default, same randomness.

        An episode that fails without them tells nothing: its reward stays what it was in `rewards`.
        """
        modes = {n: a.mode_name for n, a in self.settings.items()} | dict.fromkeys(absent, "default")
        again = self.pipeline.run(
            [e.question for e in episodes], modes=modes, sample=True, seeds=[e.seed for e in episodes],
            concurrency=len(episodes), spare=self.spare,
        )  # fmt: skip
        self._score(again)
        found = np.array([sum(e.team.values()) for e in again], dtype=float)
        return np.where([bool(e.error) for e in again], rewards, found)

    @torch.no_grad()
    def references(self, samples: Sequence[Sample]) -> None:
        """Store log-probs of the actions under the warm heads."""
        heads = {h: f"{h}@warm" for h in self.optimizers if h != CRITIC}
        for head, warm in heads.items():
            mine = [s for s in samples if s.act[0].head == head]
            for chunk in self.pipeline.llm.chunks([s.act for s in mine], head=warm):
                logp, _ = self.pipeline.llm.evaluate(chunk)
                for b, row in enumerate(chunk.rows):
                    mine[row].reference = tuple(logp[b, : len(mine[row].act[1].tokens)].tolist())

    def samples(self, episodes: Sequence[Episode]) -> list[Sample]:
        """Return the decisions that train."""
        return [
            Sample(e, i, d, (d.request, d.completion))
            for e, episode in enumerate(episodes)
            for i, d in enumerate(episode.decisions)
            if d.trains and d.agent in self.kl and d.request is not None and d.completion is not None
        ]

    # moving heads

    def _step(self, head: str, loss: torch.Tensor, rate: float) -> float:
        """Take one optimiser step of `head` alone; return the gradient norm."""
        optimizer = self.optimizers[head]
        params = [p for g in optimizer.param_groups for p in g["params"]]
        assert all(p.requires_grad for p in params), f"head {head!r} was frozen behind our back"
        if not torch.isfinite(loss):
            raise DivergedError(
                f"the loss of head {head!r} is {loss.item()}; expected a finite number: lower its lr", head
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(params, self.config.marl.grad_norm))
        if not math.isfinite(norm):
            raise DivergedError(
                f"the gradient of head {head!r} is not finite; expected a finite number: lower its lr", head
            )
        for g, lr in zip(optimizer.param_groups, self.base_lr[head], strict=True):
            g["lr"] = lr * rate
        optimizer.step()
        return norm

    def fit_critic(self, episodes: Sequence[Episode], epochs: int, seed: int, rate: float = 1.0) -> dict[str, float]:
        """Fit the critic on episodes already scored: its warm-up before the first update."""
        acts, where, values = self.values(episodes)
        credits = self.credit(episodes, where, values, replays=False)
        return self._fit(acts, where, values, credits, episodes, epochs, seed, rate)

    def _targets(
        self, where: Sequence[tuple[int, int]], credits: Sequence[Credit], episodes: Sequence[Episode]
    ) -> np.ndarray[Any, Any]:
        own = [[sum(p.values()) for p in e.process] for e in episodes]
        return np.array([(credits[e].returns[i], own[e][i]) for e, i in where], dtype=float).reshape(-1, 2)

    def _fit(
        self,
        acts: Sequence[Act],
        where: Sequence[tuple[int, int]],
        values: np.ndarray[Any, Any],
        credits: Sequence[Credit],
        episodes: Sequence[Episode],
        epochs: int,
        seed: int,
        rate: float,
    ) -> dict[str, float]:
        targets = self._targets(where, credits, episodes)
        explained = losses.explained_variance(values[:, 0], targets[:, 0])
        old = self.critic.normalised(torch.tensor(values, dtype=torch.float32))  # what it said, before the units move
        self.critic.team.add(targets[:, 0])
        self.critic.own.add(targets[:, 1])
        goal = self.critic.normalised(torch.tensor(targets, dtype=torch.float32))
        total, count, clip = 0.0, 0, self.config.marl.critic.clip
        batches = self.minibatches(acts, seed)
        for epoch in range(epochs):
            for b in np.random.default_rng((seed, epoch, 1)).permutation(len(batches)):
                per_row = []
                for chunk in batches[b]:
                    out = self.critic.forward(chunk)
                    was, wanted = old[chunk.rows].to(out.device), goal[chunk.rows].to(out.device)
                    per_row.append(losses.value_loss(out, was, wanted, clip))
                loss = torch.cat(per_row).mean()
                self._step(CRITIC, loss, rate)
                size = sum(len(chunk.rows) for chunk in batches[b])
                total, count = total + loss.item() * size, count + size
        return {"loss": total / max(1, count), "explained_variance": explained}

    def update(self, episodes: Sequence[Episode], seed: int, rate: float, number: int = 0) -> dict[str, Any]:
        """Do one joint update from scored episodes; return what happened, per agent."""
        m = self.config.marl
        acts, where, values = self.values(episodes)
        credits = self.credit(episodes, where, values)
        samples = self.samples(episodes)
        self.references(samples)
        log: dict[str, Any] = {"agents": {}}
        for s in samples:
            s.advantage = float(credits[s.episode].advantages[s.index])
        for name in self.learning:
            mine = [s for s in samples if s.decision.agent == name]
            log["agents"][name] = self._describe(name, mine, credits, episodes)
            if m.normalise == "agent":
                self._normalise(mine, self.spread[name])
        if m.normalise == "all":
            self._normalise(samples, self.spread[ALL])
        log["critic"] = self._fit(acts, where, values, credits, episodes, m.critic.epochs, seed, rate)
        by_agent = self._explained(where, values, credits, episodes)
        rests = {n for n in self.learning if number % self.settings[n].interval}
        policy = self._policy([s for s in samples if s.decision.agent not in rests], seed, rate)
        for name in self.learning:
            log["agents"][name] |= policy.get(name, {}) | {"explained_variance": by_agent.get(name, 0.0)}
            if log["agents"][name]["decisions"]:
                self.kl[name].observe(log["agents"][name]["kl_to_warm"])
            log["agents"][name]["beta"] = self.kl[name].beta
        return log

    def _normalise(self, samples: Sequence[Sample], spread: losses.RunningStat) -> None:
        raw = np.array([s.advantage for s in samples], dtype=float)
        own = np.array([not s.decision.spared for s in samples], dtype=bool)  # what the policy does by itself
        for s, a in zip(samples, losses.normalise(raw, spread, self.config.marl.std_floor, own), strict=True):
            s.advantage = float(a)

    def _describe(
        self,
        name: str,
        mine: Sequence[Sample],
        credits: Sequence[Credit],
        episodes: Sequence[Episode],
    ) -> dict[str, Any]:
        own = [e for e in episodes if not e.spared] or episodes
        calls = [d for e in own for d in e.of(name)]
        mine = [s for s in mine if not s.decision.spared]
        raw = np.array([s.advantage for s in mine], dtype=float)
        process: dict[str, list[float]] = {}
        for s in mine:
            for term, x in episodes[s.episode].process[s.index].items():
                process.setdefault(term, []).append(x)
        drift = [sum(s.act[1].logprobs) - sum(s.reference) for s in mine]
        team = [float(credits[s.episode].team[s.index]) for s in mine]
        return {
            "decisions": len(mine),
            "advantage_mean": float(raw.mean()) if len(raw) else 0.0,
            "advantage_std": float(raw.std()) if len(raw) else 0.0,
            "advantage_team": float(np.mean(team)) if team else 0.0,
            "advantage_size": float(np.abs(raw).mean()) if len(raw) else 0.0,
            "process": {k: sum(v) / len(mine) for k, v in sorted(process.items())},
            "malformed": sum(d.malformed for d in calls) / max(1, len(calls)),
            "kl_to_warm": float(np.mean(drift)) if drift else 0.0,
            "length": float(np.mean([len(s.act[1].tokens) for s in mine])) if mine else 0.0,
            **behaviour(calls),
            **({"silence": pays} if (pays := silence(name, own)) else {}),
        }

    def _explained(
        self,
        where: Sequence[tuple[int, int]],
        values: np.ndarray[Any, Any],
        credits: Sequence[Credit],
        episodes: Sequence[Episode],
    ) -> dict[str, float]:
        targets = self._targets(where, credits, episodes)
        out = {}
        for name in self.learning:
            rows = [r for r, (e, i) in enumerate(where) if episodes[e].decisions[i].agent == name]
            out[name] = losses.explained_variance(values[rows, 0], targets[rows, 0]) if rows else 0.0
        return out

    def _policy(self, samples: Sequence[Sample], seed: int, rate: float) -> dict[str, dict[str, float]]:
        m = self.config.marl
        batches = self.minibatches([s.act for s in samples], seed)
        sums: dict[str, dict[str, float]] = {}
        for epoch in range(m.epochs):
            for n in np.random.default_rng((seed, epoch, 0)).permutation(len(batches)):
                parts = [(chunk, self._loss(chunk, [samples[r] for r in chunk.rows])) for chunk in batches[n]]
                norm = self._step(str(batches[n][0].head), torch.cat([loss.total for _, loss in parts]).mean(), rate)
                for chunk, loss in parts:
                    told = zip(loss.kl.tolist(), loss.entropy.tolist(), loss.clipped.tolist(), strict=True)
                    for row, figures in zip(chunk.rows, told, strict=True):
                        into = sums.setdefault(samples[row].decision.agent, dict.fromkeys(LOGGED, 0.0))
                        for key, x in zip(LOGGED, (1.0, *figures, norm), strict=True):
                            into[key] += x
        return {name: {k: v / s["n"] for k, v in s.items() if k != "n"} for name, s in sums.items()}

    def _loss(self, chunk: Chunk, mine: Sequence[Sample]) -> losses.PolicyLoss:
        """Return the loss of the decisions of a chunk."""
        logp, entropy = self.pipeline.llm.evaluate(chunk)
        device, width = logp.device, logp.shape[1]

        def padded(rows: list[tuple[float, ...]]) -> torch.Tensor:
            return torch.tensor([[*r, *([0.0] * (width - len(r)))] for r in rows], device=device)

        def per(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)

        settings = [self.settings[s.decision.agent] for s in mine]
        return losses.policy_loss(
            logp,
            padded([s.act[1].logprobs for s in mine]),
            padded([s.reference for s in mine]),
            entropy,
            chunk.used_BT,
            per([s.advantage for s in mine]),
            per([a.clip if a.clip is not None else self.config.marl.clip for a in settings]),
            per([self.kl[s.decision.agent].beta for s in mine]),
            per([a.entropy for a in settings]),
            torch.tensor([bool(s.decision.spared) for s in mine], device=device),
        )

    def start_over(self, slower: Sequence[str]) -> None:
        """Forget the momentum of all heads, which was of other weights; lower the rate of `slower` ones for good."""
        for h, o in self.optimizers.items():
            if h != CRITIC:
                o.state.clear()
        for h in slower:
            self.base_lr[h] = [lr * SLOWER for lr in self.base_lr[h]]

    # state

    def state(self) -> dict[str, Any]:
        """Return everything an update changes, heads aside."""

        def stat(r: losses.RunningStat) -> tuple[float, float, float]:
            return r.mean, r.square, r.weight

        return {
            "optimizers": {h: o.state_dict() for h, o in self.optimizers.items()},
            "base_lr": {h: list(lr) for h, lr in self.base_lr.items()},
            "beta": {n: k.beta for n, k in self.kl.items()},
            "spread": {n: stat(r) for n, r in self.spread.items()},
            "critic": (stat(self.critic.team), stat(self.critic.own)),
            "budget": self.budget.state() if self.budget else None,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a stored state."""
        for h, o in self.optimizers.items():
            o.load_state_dict(state["optimizers"][h])
            self.base_lr[h] = list(state["base_lr"][h])
        for n, k in self.kl.items():
            k.beta = state["beta"][n]
        if self.budget:
            self.budget.set_state(state["budget"])
        for target, (mean, square, weight) in [
            *((self.spread[n], state["spread"][n]) for n in self.spread),
            (self.critic.team, state["critic"][0]),
            (self.critic.own, state["critic"][1]),
        ]:
            target.mean, target.square, target.weight = mean, square, weight

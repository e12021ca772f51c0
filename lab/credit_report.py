"""Credit report: what each node of a trained run is worth, question by question, on its held-out questions.

    credit   by the rule: difference R(all) - R(without), or the Shapley value over all agents
    harm     share of questions with a worse reward for the node acting than for its default action
    help     share of questions with a better one
    cost     tokens, language model calls and searches of the node's own decisions, a question

R is the team reward of the run's config, greedy; an absent node takes its default action, the rest of the graph runs
again. From the training log: the critic's explained variance at the node's decisions, and the node's share of all
advantage, sum |A| over its decisions, both over the last updates.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jointrag.configs.load import load_run
from jointrag.data.errors import CheckpointError, ConfigError, nearest
from jointrag.data.types import Question
from jointrag.eval.evaluation import aligned, write_json_atomic
from jointrag.eval.report import episode_record
from jointrag.eval.statistics import as_json, bootstrap_mean
from jointrag.graph.episode import Decision, Episode
from jointrag.graph.pipeline import Pipeline
from jointrag.marl.credit.base import Floats
from jointrag.marl.credit.shapley import EXACT, ORDERS, exact, sampled
from jointrag.rewards.build import RewardFunction, config_rewards

RULES = ("difference", "shapley")
EXAMPLES = 5  # episodes shown each way
LAST = 5  # updates of the training log
TIE = 1e-9


def report(
    folder: Path, rule: str = "difference", count: int | None = None, say: Callable[[str], None] = lambda _: None,
    pipeline: Pipeline | None = None, questions: Sequence[Question] = (),
) -> dict[str, Any]:  # fmt: skip
    """Measure, write and return credit.json of a run folder; `count`: held-out questions, by default those of eval.

    pipeline, questions: for a run trained from Python, which holds neither.
    """
    from jointrag.marl.run import load_trained

    if rule not in RULES:
        raise ConfigError(f"rule: got {rule!r}, expected one of {', '.join(RULES)}.{nearest(rule, RULES)}")
    if count is not None and count < 1:
        raise ConfigError(f"questions: got {count}, expected at least 1")
    load_run(folder, need_data=False)
    log = training(folder)  # before anything is spent
    opened, config, questions = load_trained(folder, pipeline, questions)
    questions = questions[:count]
    rewards = config_rewards(config, [a.name for a in opened.agents], opened.max_hops)
    trained = config.marl.updates * config.marl.episodes_per_update
    held = {n for n, mode in opened.modes.items() if mode == "default"}
    agents = [a.name for a in opened.agents if a.name not in held]
    known: dict[frozenset[str], list[Episode]] = {}

    def run(absent: frozenset[str]) -> list[Episode]:
        if absent not in known:
            say(f"answering without {', '.join(sorted(absent)) or 'nobody'}")
            known[absent] = opened.run(questions, modes=dict.fromkeys(absent, "default"), sample=False)
        return known[absent]

    rows = rows_of(agents, run, rewards, trained, rule, config.eval.bootstrap, config.seed)
    out = {"n": len(questions), "rule": rule, "rows": [row | log.get(row["agent"], {}) for row in rows]}
    write_json_atomic(folder / "credit.json", out)
    return out


def rows_of(
    agents: Sequence[str], run: Callable[[frozenset[str]], list[Episode]], rewards: RewardFunction, episodes_done: int,
    rule: str = "difference", resamples: int = 10_000, seed: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one row an agent. run(absent): the same questions, these agents at their default."""

    @functools.cache
    def reward(absent: frozenset[str]) -> Floats:
        episodes = run(absent)
        for e in episodes:
            rewards.score(e, episodes_done)
        return np.array([sum(e.team.values()) for e in episodes], dtype=float)

    everyone, full, base = frozenset(agents), run(frozenset()), reward(frozenset())
    gains = {a: base - reward(frozenset({a})) for a in agents}
    credit = gains
    if rule == "shapley":

        def of(coalition: frozenset[str]) -> Floats:
            return reward(everyone - coalition)

        credit = exact(agents, of) if len(agents) <= EXACT else sampled(agents, of, ORDERS)
    rows = []
    for a in agents:
        gain, absent = gains[a], run(frozenset({a}))
        mine = [d for e in full for d in e.of(a)]
        order = np.argsort(-gain, kind="stable")
        best = [int(i) for i in order[:EXAMPLES] if gain[i] > TIE]
        worst = [int(i) for i in order[::-1][:EXAMPLES] if gain[i] < -TIE]
        rows.append(
            {
                "agent": a,
                "credit": as_json(bootstrap_mean(credit[a], resamples, seed=seed)),
                "harm": as_json(bootstrap_mean((gain < -TIE).astype(float), resamples, seed=seed)),
                "help": as_json(bootstrap_mean((gain > TIE).astype(float), resamples, seed=seed)),
                **_cost(mine, len(full)),
                "helped_most": [_example(full[i], absent[i], float(gain[i])) for i in best],
                "hurt_most": [_example(full[i], absent[i], float(gain[i])) for i in worst],
            }
        )
    return rows


def _cost(decisions: Sequence[Decision], questions: int) -> dict[str, float]:
    totals = {
        "tokens": sum(d.tokens for d in decisions),
        "llm_calls": sum(d.completion is not None for d in decisions),
        "searches": sum(d.searches for d in decisions),
    }
    return {k: v / max(1, questions) for k, v in totals.items()}


def _example(with_it: Episode, without: Episode, gain: float) -> dict[str, Any]:
    question = with_it.question
    return {
        "question": question.question, "answers": list(question.answers), "gain": gain,
        "with": episode_record(with_it), "without": episode_record(without),
    }  # fmt: skip


def training(folder: Path) -> dict[str, dict[str, float | None]]:
    """Return of each agent that learnt: explained variance at its decisions, and its share of all advantage."""
    try:
        lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder}/metrics.jsonl cannot be read ({e}); expected the log of a training") from e
    last: list[Mapping[str, Any]] = [line["agents"] for line in lines if line.get("agents")][-LAST:]
    names = list(dict.fromkeys(a for agents in last for a in agents))
    size = {a: sum(of[a]["decisions"] * of[a].get("advantage_size", 0.0) for of in last if a in of) for a in names}
    total = sum(size.values())
    return {
        a: {
            "explained_variance": float(np.mean([of[a]["explained_variance"] for of in last if a in of])),
            "advantage_share": size[a] / total if total else None,
        }
        for a in names
    }


def table(found: Mapping[str, Any]) -> str:
    """Return credit.json as an aligned table."""
    head = [
        "agent",
        "credit",
        "95% interval",
        "helps",
        "harms",
        "tokens",
        "LLM calls",
        "searches",
        "expl. var.",
        "advantage",
    ]
    lines = [head]
    for row in found["rows"]:
        lo, hi = row["credit"]["interval"]
        variance, share = row.get("explained_variance"), row.get("advantage_share")
        lines.append(
            [
                row["agent"], f"{row['credit']['mean']:+.3f}", f"[{lo:+.3f}, {hi:+.3f}]",
                f"{row['help']['mean']:.1%}", f"{row['harm']['mean']:.1%}", f"{row['tokens']:,.0f}",
                f"{row['llm_calls']:.2f}", f"{row['searches']:.2f}",
                "-" if variance is None else f"{variance:.2f}", "-" if share is None else f"{share:.0%}",
            ]
        )  # fmt: skip
    return "\n".join([f"{found['n']:,} questions, credit by {found['rule']}", "", *aligned(lines)])

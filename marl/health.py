"""Training health: what one update's log says of each agent, and the likely cause where something goes wrong.

Symptoms are read off figures every update logs anyway, against the first update where the level alone says little: how
often a policy answers, searches or keeps something differs from graph to graph; that it stops doing so does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointrag.graph.episode import Decision, Episode
from jointrag.rewards.reading import abstains, may_abstain, plans, queries

Record = Mapping[str, Any]  # a line of metrics.jsonl

FALLEN = 0.3  # of the first update's figure
SILENT = 0.6  # of the first update's share of answers
PAID = 0.1  # more for not answering than for answering, by one process term
ALIKE = 1e-3  # standard deviation of advantages below which a batch teaches nothing
FAR = 4.0  # times the KL target
CLIPPED = 0.6  # share of tokens or picks outside the clip range
STEEP = 1000.0  # times the norm gradients are cut to
MALFORMED = 0.25  # share of decisions
LONG = 2.0  # times the first update's length
EMPTY = 0.8  # share of selections
LOST = 0.1  # dev F1 below the best


FEW = 0.5  # of a search budget


@dataclass(frozen=True)
class Symptom:
    """Something wrong with an agent. severe: going on as before is not expected to mend it."""

    agent: str
    what: str
    cause: str
    severe: bool = False

    def __str__(self) -> str:
        """One line for people."""
        return f"{self.agent}: {self.what}; likely {self.cause}"


def behaviour(calls: Sequence[Decision]) -> dict[str, float]:
    """Return what an agent does, as shares or means over its decisions; only what it can do at all.

    answered: wrote an answer, and not "unknown". empty: kept none of the passages shown. queries: asked a decision.
    """
    answers = [str(d.update["answer"]) for d in calls if "answer" in d.update]
    selections = [d for d in calls if "evidence" in d.update and "passages" not in d.update and not d.forced]
    planned = [len(queries(d)) for d in calls if plans(d) and not d.forced]
    out = {}
    if answers:
        out["answered"] = sum(not abstains(a) for a in answers) / len(answers)
    if selections:
        out["empty"] = sum(not d.update["evidence"] for d in selections) / len(selections)
    if planned:
        out["queries"] = sum(planned) / len(planned)
    return out


def silence(agent: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return by term how much more not answering earned than answering, on answerable questions; {} where unknown.

    Terms as in the config's `rewards`: "team.f1", "answerer.grounded" ..., mean over abstaining minus over answering.
    """
    earned: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for e in episodes:
        for d, process in zip(e.decisions, e.process, strict=True):
            if d.agent == agent and "answer" in d.update and not may_abstain(e.question):
                terms = {f"team.{k}": v for k, v in e.team.items()} | {f"{agent}.{k}": v for k, v in process.items()}
                earned[abstains(str(d.update["answer"]))].append(terms)
    if not all(earned.values()):
        return {}
    names = sorted({k for rows in earned.values() for terms in rows for k in terms})
    mean = {s: {k: sum(t.get(k, 0.0) for t in rows) / len(rows) for k in names} for s, rows in earned.items()}
    return {k: mean[True][k] - mean[False][k] for k in names}


def _paid(pays: Mapping[str, float]) -> str:
    """Return the likely cause of an agent that does not answer, from what each term pays for it."""
    term = max(pays, key=lambda t: pays[t], default="")
    if term and pays[term] > 0:
        return f"{term} pays {pays[term]:+.2f} more for not answering: mend it (jointrag lint)"
    return "not answering is safer than answering wrong: raise the weight of team.no_answer (jointrag lint)"


def symptoms(
    record: Record, first: Record, settings: Mapping[str, Any], grad_norm: float, best: float
) -> list[Symptom]:
    """Return what is wrong after an update. settings: agent -> its AgentConfig. best: the best dev F1 so far."""
    out: list[Symptom] = []
    for name, now in record["agents"].items():
        was, target = first.get(name, now), settings[name].kl.target
        if not now["decisions"]:
            continue

        def fallen(key: str, now: Record = now, was: Record = was) -> bool:
            return key in now and now[key] < FALLEN * was.get(key, 0.0)

        def add(what: str, cause: str, severe: bool = False, name: str = name) -> None:
            out.append(Symptom(name, what, cause, severe))

        pays = now.get("silence") or {}
        if now.get("answered", 1.0) < SILENT * was.get("answered", 0.0):
            add(
                f"answers {now['answered']:.0%} of the time, {was['answered']:.0%} at first",
                _paid(pays or was.get("silence") or {}), True,
            )  # fmt: skip
        elif sum(pays.values()) > 0:
            add(f"earns {sum(pays.values()):.2f} more by not answering than by answering", _paid(pays))
        elif own := {t: x for t, x in pays.items() if t.startswith(f"{name}.") and x > PAID and t != f"{name}.format"}:
            add("is paid for not answering, though answering earns more in all", _paid(own))
        budget = record.get("budget")
        asked_for = budget is not None and budget["searches"] >= FEW * budget["limit"]
        if fallen("queries") and not asked_for:
            add(
                f"asks {now['queries']:.2f} queries a decision, {was['queries']:.2f} at first",
                "searching costs more than it brings: lower or ramp the cost of searches", True,
            )  # fmt: skip
        if now.get("empty", 0.0) > EMPTY and was.get("empty", 0.0) < EMPTY / 2:
            add(
                f"keeps nothing {now['empty']:.0%} of the time, {was['empty']:.0%} at first",
                "keeping nothing costs too little, or no gold is found: raise `miss` of its evidence term", True,
            )  # fmt: skip
        if now["advantage_std"] < ALIKE:
            add(
                f"advantages are all alike (std {now['advantage_std']:.2g})",
                "every episode ends the same: raise temperature, or add a process reward for this agent",
            )
        if fallen("entropy"):
            add(
                f"entropy is {now['entropy']:.3g}, {was['entropy']:.3g} at first",
                "it settled on one action each time: raise its entropy bonus, or lower its lr",
            )
        if now["kl_to_warm"] > FAR * target:
            add(
                f"KL to the warm start is {now['kl_to_warm']:.2f}, target {target:g}",
                "its lr is too high for its KL weight: lower lr, or raise kl.beta", True,
            )  # fmt: skip
        if now.get("clipped", 0.0) > CLIPPED:
            add(f"{now['clipped']:.0%} of its tokens are clipped", "its lr is too high, or its clip too narrow")
        if now.get("gradient", 0.0) > STEEP * grad_norm:
            add(f"gradient norm {now['gradient']:.3g}", "a few tokens far from the warm start: lower lr or kl.beta")
        if now["malformed"] > MALFORMED and now["malformed"] > was["malformed"]:
            add(
                f"{now['malformed']:.0%} of its output is malformed, {was['malformed']:.0%} at first",
                "it left the format: raise kl.beta, or the weight of rewards.format", True,
            )  # fmt: skip
        if was["length"] and now["length"] > LONG * was["length"]:
            add(
                f"output is {now['length']:.1f} tokens long, {was['length']:.1f} at first",
                "length is rewarded somewhere",
            )
    dev = record.get("dev_f1")
    if dev is not None and dev < best - LOST and record["agents"]:
        moved = {n: a["kl_to_warm"] / settings[n].kl.target for n, a in record["agents"].items()}
        name = max(moved, key=lambda n: moved[n])
        cause = "a step too far, the agent furthest from its warm start first: lower its lr"
        out.append(Symptom(name, f"dev F1 fell to {dev:.3f} from {best:.3f}", cause, severe=True))
    return out

"""F1 of every combination of oracle and default agents: what a world asks of each, without a language model.

An agent's worth is F1(all oracle) - F1(all oracle but this agent, which takes its default action). A world in which an
agent is worth nothing cannot show what training it brings.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jointrag.data.types import Question
from jointrag.eval.metrics import f1

if TYPE_CHECKING:  # it imports torch
    from jointrag.graph.pipeline import Pipeline


def combinations(
    pipeline: Pipeline, questions: Sequence[Question], progress: Callable[[int], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Return {"oracle": [agents], "f1", "searches"} of all 2^n combinations, fewest oracles first.

    progress: called with the episodes done so far, over all combinations.
    """
    names = [a.name for a in pipeline.agents]
    chosen = [c for size in range(len(names) + 1) for c in itertools.combinations(names, size)]
    out = []
    for i, oracles in enumerate(chosen):
        modes = {n: "oracle" if n in oracles else "default" for n in names}
        count = partial(_count, progress, i * len(questions))
        episodes = pipeline.run(questions, modes=modes, progress=count)
        scores = [f1(e.answer, e.question.answers) for e in episodes]
        searches = sum(e.searches for e in episodes) / len(episodes)
        out.append({"oracle": list(oracles), "f1": sum(scores) / len(scores), "searches": searches})
    return out


def _count(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def worth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return agent -> what the oracle pipeline loses without it."""
    by_set = {frozenset(r["oracle"]): float(r["f1"]) for r in rows}
    everyone = max(by_set, key=len)
    order = next(r["oracle"] for r in rows if len(r["oracle"]) == len(everyone))
    return {n: by_set[everyone] - by_set[everyone - {n}] for n in order}


def combinations_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the combinations as an aligned table, then the worth of each agent."""
    names = max((r["oracle"] for r in rows), key=len)
    widths = [max(len(n), len("default")) for n in names]
    lines = ["  ".join([*(n.ljust(w) for n, w in zip(names, widths, strict=True)), "   F1", "searches"])]
    for row in rows:
        cells = [("oracle" if n in row["oracle"] else "default").ljust(w) for n, w in zip(names, widths, strict=True)]
        lines.append("  ".join([*cells, f"{row['f1']:5.3f}", f"{row['searches']:8.2f}"]))
    lines += ["", "worth to the oracle pipeline (F1 lost without the agent)"]
    width = max(map(len, names))
    lines += [f"{name.ljust(width)}  {value:+.3f}" for name, value in worth(rows).items()]
    return "\n".join(lines)

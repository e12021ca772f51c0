"""Pareto: one training for each search budget, and F1 against the searches and tokens a question costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jointrag.data.errors import ConfigError
from jointrag.eval.evaluation import aligned, write_json_atomic
from jointrag.eval.report import Series, line_chart, write_page
from jointrag.lab.ablate import FULL, ablate_grid, make_grid

FREE = "no budget"


def sweep(
    config: str, budgets: Sequence[float], seeds: Sequence[int], out: Path, common: Sequence[str] = (),
    workers: int = 1, say: Callable[[str], None] = lambda _: None, where: str = "local",
) -> dict[str, Any]:  # fmt: skip
    """Train what is missing; write pareto.json and pareto.html into `out`, and return the first.

    budgets: mean searches a question; training without a budget stands beside them.
    """
    if not budgets or min(budgets) <= 0:
        raise ConfigError(f"budgets: got {list(budgets)}, expected numbers above 0: mean searches a question")
    arms = {f"{b:g} searches": [f"marl.budget={{searches: {b}}}"] for b in sorted(set(budgets))}
    sets = {"seeds": list(seeds), "arms": arms, "common": [*common, "marl.budget=null"], "out": str(out)}
    found = ablate_grid(make_grid({"config": config, **sets}, "pareto"), workers, say, where)
    rows = [{**row, "arm": FREE if row["arm"] == FULL else row["arm"]} for row in found["rows"]]
    for row in rows:
        row["on_frontier"] = not any(_beats(other, row) for other in rows)
    result = {**found, "rows": sorted(rows, key=lambda r: r["searches"])}
    write_json_atomic(out / "pareto.json", result)
    write_page(out / "pareto.html", f"{out.name} · pareto", _body(result))
    return result


def _beats(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True where `one` is at least as good and as cheap, and better in something."""
    ones, others = ((r["f1"]["mean"], -r["searches"]) for r in (one, other))
    return all(a >= b for a, b in zip(ones, others, strict=True)) and ones != others


def table(found: Mapping[str, Any]) -> str:
    """Return pareto.json as an aligned table, the frontier marked."""
    lines = [["budget", "F1", "95% interval", "searches", "tokens", "LLM calls", "frontier"]]
    for row in found["rows"]:
        lo, hi = row["f1"]["interval"]
        cells = [row["arm"], f"{row['f1']['mean']:.3f}", f"[{lo:.3f}, {hi:.3f}]", f"{row['searches']:.2f}"]
        lines.append([*cells, f"{row['tokens']:,.0f}", f"{row['llm_calls']:.2f}", "*" if row["on_frontier"] else ""])
    return "\n".join([f"{found['n']:,} questions, {found['seeds']} seeds", "", *aligned(lines)])


def _body(found: Mapping[str, Any]) -> str:
    charts = []
    for key, what in (("searches", "searches a question"), ("tokens", "tokens a question")):
        rows = sorted(found["rows"], key=lambda r, key=key: r[key])  # type: ignore[misc]
        points = [(r[key], r["f1"]["mean"]) for r in rows]
        drawn = line_chart(f"F1 against {what}", [Series("", "after", points, dots=True)], 880, 300, x_title=what)
        charts.append(f"<h2>F1 against {what}</h2><figure class='scroll'>{drawn}</figure>")
    return f"<h1>Search budget</h1><pre>{table(found)}</pre>{''.join(charts)}"

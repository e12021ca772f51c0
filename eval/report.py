"""report.html: one self-contained page on a run, drawn from its files; readable without network or JavaScript.

Every file may be missing, cut short by a kill, or of an older version: the page shows what there is and names what is
not. Charts are inline SVG drawn here. Whatever comes from data is escaped, and the page's own Content-Security-Policy
forbids scripts and any load, so retrieved markup stays text.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import yaml

from jointrag.data.errors import CheckpointError
from jointrag.eval.evaluation import BANK, differences, gap_closed, variants, write_jsonl_atomic, write_text_atomic
from jointrag.eval.metrics import f1
from jointrag.graph.episode import Decision, Episode

Json = Mapping[str, Any]

# Block of eval.json -> what it is, in the reader's words.
MEANING = {
    "vanilla": "searches with the question itself; warm answerer",
    "trunk": "every agent prompted, no head",
    "before": "warm start",
    "sft_more": "warm start continued, at the cost of joint training",
    "after": "joint training",
    "ceiling": "oracle rewriter, retriever and filter; the better answerer",
    "oracle": "all agents oracle",
}


# example episodes


def episode_record(episode: Episode) -> dict[str, Any]:
    """Return answer, F1 and every decision in words; "passages" lists [title, is gold] where a step chose some."""
    gold = set(episode.question.supporting_ids)
    return {
        "answer": episode.answer,
        "f1": f1(episode.answer, episode.question.answers) if episode.question.answers else None,
        "steps": [_step(d, gold) for d in episode.decisions],
    }


def _step(decision: Decision, gold: set[str]) -> dict[str, Any]:
    update = decision.update
    step: dict[str, Any] = {"node": decision.node, "hop": decision.hop}
    chosen = update.get("passages", update.get("evidence"))
    if decision.failed:
        step["action"] = f"the tool failed: {decision.failed}"
    elif chosen is not None:
        step["action"] = "; ".join(p.title for p in chosen) or "none"
        step["passages"] = [[p.title, p.id in gold] for p in chosen]
    elif "pending" in update:
        step["action"] = " | ".join(map(str, update["pending"])) or "stop"
    else:
        step["action"] = str(update.get("answer", decision.value))
    return step | {"malformed": decision.malformed}


def episode_pair(before: Episode, after: Episode) -> dict[str, Any]:
    """Return a line of episodes.jsonl: one question, answered before and after joint training."""
    question = before.question
    if question.id != after.question.id:
        raise ValueError(
            f"after: got question {after.question.id!r}, expected {question.id!r}; pair the same questions"
        )
    return {
        "question": question.question,
        "answers": list(question.answers),
        "supporting_ids": list(question.supporting_ids),
        "before": episode_record(before),
        "after": episode_record(after),
    }


def write_episodes(run_folder: Path, before: Sequence[Episode], after: Sequence[Episode], count: int = 20) -> None:
    """Write episodes.jsonl: the first `count` questions, not picked by how they came out."""
    pairs = [episode_pair(b, a) for b, a in zip(before[:count], after[:count], strict=True)]
    write_jsonl_atomic(run_folder / "episodes.jsonl", pairs)


# the page


def write_report(run_folder: Path) -> Path:
    """Write report.html into the run folder from what lies there; return its path."""
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        raise CheckpointError(f"{run_folder}: got no such folder, expected a run folder; check the path")
    config_text = _text(run_folder / "config.yaml")
    metrics = _lines(run_folder / "metrics.jsonl")
    summary = _object(run_folder / "eval.json")
    lab = _lab(_object(run_folder / "ablate.json"), _object(run_folder / "credit.json"))
    sections = [
        ("time", "F1 over time", _over_time(metrics, _object(run_folder / "training.json"))),
        ("agents", "Reward and KL of each agent", _agents(metrics, summary)),
        ("table", "Before and after", _before_after(summary)),
        ("differences", "What joint training changes", _differences(summary)),
        ("hops", "F1 by hops", _by_hops(summary)),
        *lab,
        ("graph", "The graph", _graph(_text(run_folder / "graph.mermaid"))),
        ("episodes", "Example episodes", _episodes(_lines(run_folder / "episodes.jsonl"))),
        (
            "config",
            "Config",
            f"<pre>{_e(config_text)}</pre>" if config_text else _note("No config.yaml in this folder."),
        ),
    ]
    name = run_folder.resolve().name
    head = _head(name, config_text, metrics, summary)
    if lab and not config_text:  # the folder of a grid: each of its runs has a report of its own
        head, sections = f'<p class="kicker">jointrag report</p><h1>{_e(name)}</h1>', lab
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
    body = head + f"<nav>{links}</nav>"
    body += "".join(f'<h2 id="{key}">{title}</h2>\n{content}\n' for key, title, content in sections)
    return write_page(run_folder / "report.html", f"{name} · jointrag", body)


def write_page(path: Path, title: str, body: str) -> Path:
    """Write a self-contained page around `body`, which is HTML; return its path."""
    page = (resources.files("jointrag.eval") / "templates" / "report.html.txt").read_text(encoding="utf-8")
    write_text_atomic(path, Template(page).substitute(title=_e(title), body=body))
    return path


def _head(name: str, config_text: str, metrics: Sequence[Json], summary: Json) -> str:
    facts = _facts(config_text)
    if metrics:
        last = metrics[-1]
        facts += [f"{int(x):,} {word}" for word in ("updates", "episodes") if (x := _get(last, word.rstrip("s")
                  if word == "updates" else word)) is not None]  # fmt: skip
    before, after = (_get(summary, name, "f1", "mean") for name in ("before", "after"))
    n = _get(summary, "n")
    if after is None or n is None:
        lede, tiles = "This run has not been evaluated yet.", ""
    elif before is None:
        lede, tiles = f"F1 {after:.3f} on {int(n):,} held-out questions after joint training.", ""
    else:
        lo, hi = _ends(_dict(_dict(summary.get("after_minus_before")).get("f1")))
        verb = "changes"
        if lo is not None and hi is not None:
            verb = "raises" if lo > 0 else "lowers" if hi < 0 else "does not clearly change"
        lede = f"Joint training {verb} F1 on {int(n):,} held-out questions: {before:.3f} before, {after:.3f} after."
        cells = [("F1, warm start", f"{before:.3f}", _range(_dict(_dict(summary["before"])["f1"]), ".3f"))]
        cells.append(("F1, joint training", f"{after:.3f}", _range(_dict(_dict(summary["after"])["f1"]), ".3f")))
        for key, label in (
            ("after_minus_before", "Gain over warm start"),
            ("after_minus_sft_more", "Gain over more SFT"),
        ):
            figure = _dict(_dict(summary.get(key)).get("f1"))
            if (mean := _get(figure, "mean")) is not None:
                cells.append((label, _signed(mean), _range(figure, "+.3f")))
        if (closed := gap_closed(summary)) is not None:
            cells.append(("Of the way to the ceiling", f"{closed:.0%}", ""))
        tiles = "".join(f"<div><dt>{_e(a)}</dt><dd>{_e(b)}<small>{_e(c)}</small></dd></div>" for a, b, c in cells)
        tiles = f'<dl class="tiles">{tiles}</dl>'
    return (
        f'<p class="kicker">jointrag report</p><h1>{_e(name)}</h1><p class="lede">{_e(lede)}</p>'
        f'<p class="meta">{_e(" · ".join(facts))}</p>{tiles}'
    )


def _facts(config_text: str) -> list[str]:
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        return []
    if not isinstance(config, Mapping):
        return []
    found = [
        ("algorithm", _dict(config.get("marl")).get("algorithm")),
        ("model", _dict(config.get("llm")).get("model")),
        ("seed", config.get("seed")),
    ]
    return [f"{word} {value}" for word, value in found if value is not None]


def _over_time(metrics: Sequence[Json], training: Json) -> str:
    x = _x(metrics)
    train, dev = _points(metrics, x, "train_f1"), _points(metrics, x, "dev_f1")
    if (warm := _get(training, "dev_f1", "0")) is not None:  # metrics.jsonl begins after the first update
        dev = [(0.0, warm), *dev]
    if not train and not dev:
        return _note("No training yet: metrics.jsonl holds no F1.")
    series = [Series("train, sampled", "other", train, thin=True), Series("dev, greedy", "after", dev, dots=True)]
    best = max(dev, key=lambda p: (p[1], -p[0])) if dev else None
    axis = _axis(metrics)
    chart = line_chart("F1 over time", series, 880, 300, y=(0.0, 1.0), x_title=axis, best=best)
    caption = f"Best dev F1 {best[1]:.3f} at {int(best[0]):,} {axis}." if best else ""
    team = [Series("", "after", _points(metrics, x, "team_reward"))]
    variance = [Series("", "after", _points(metrics, x, "critic", "explained_variance"))]
    searches = [Series("", "after", _points(metrics, x, "searches"))]
    small = [_small("Team reward", team), _small("Explained variance of the critic", variance)]
    small.append(_small("Searches a question", searches))
    return (
        f'<figure class="scroll">{chart}<figcaption>{_e(caption)}</figcaption></figure>'
        f'<div class="multiples" style="margin-top:1.4rem">{"".join(small)}</div>'
    )


def _agents(metrics: Sequence[Json], summary: Json) -> str:
    names = list(dict.fromkeys(str(a) for line in metrics for a in _dict(line.get("agents"))))
    if not names:
        return _note("No training yet: metrics.jsonl names no agent.")
    x, out, rows = _x(metrics), [], []
    for name in names:
        of = [_dict(_dict(line.get("agents")).get(name)) for line in metrics]
        reward = [
            (a, sum(terms)) for a, line in zip(x, of, strict=True) if (terms := _numbers(_dict(line.get("process"))))
        ]
        charts = [
            _small("Process reward", [Series("", "after", reward)]),
            _small("KL to the warm start, nats a decision", [Series("", "before", _points(of, x, "kl_to_warm"))]),
            _small("Explained variance", [Series("", "other", _points(of, x, "explained_variance"))]),
        ]
        out.append(f'<h3>{_e(name)}</h3><div class="multiples">{"".join(charts)}</div>')
        last: Json = next((line for line in reversed(of) if line), {})
        cells = [_cell(_get(last, key), form) for key, form in _AGENT_COLUMNS]
        held_out = [_cell(_get(summary, v, "malformed", name, "mean"), ".1%") for v in _WHEN[1:]]
        rows.append(f"<tr><th>{_e(name)}</th>{''.join(cells)}{''.join(held_out)}</tr>")
    titles = ("decisions", "length", "entropy", "KL beta", "clipped", "gradient", *(f"malformed<br>{w}" for w in _WHEN))
    head = "".join(f"<th>{t}</th>" for t in ("agent", *titles))
    warned = [(line, str(w)) for line in metrics for w in _list(line.get("warnings"))]
    health = "".join(f"<li>update {_e(str(line.get('update', '?')))}: {_e(w)}</li>" for line, w in warned)
    return "".join(out) + (
        (f"<h3>Warnings</h3><ul>{health}</ul>" if health else "")
        + f'<h3>At the last update</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        + _note("Before and after: malformed output on the held-out questions, greedy.")
    )


_WHEN = ("train", "before", "after")
_AGENT_COLUMNS = (
    ("decisions", ",.0f"),
    ("length", ".1f"),
    ("entropy", ".3f"),
    ("beta", ".4f"),
    ("clipped", ".1%"),
    ("gradient", ".3f"),
    ("malformed", ".1%"),
)


def _before_after(summary: Json) -> str:
    bank = _dict(summary.get(BANK))
    if not bank:
        return _variants(summary, "held-out questions")
    return _variants(summary, "held-out questions") + (
        f"<h3>The same in held-out wordings</h3>{_variants(bank, 'questions')}{_differences(bank)}"
    )


def _variants(summary: Json, what: str) -> str:
    blocks = variants(summary)
    if not blocks:
        return _note("No evaluation yet: `jointrag eval` on this folder writes eval.json.")
    scale = Scale(0.0, 1.0, 240)
    rows = []
    for name, block in blocks.items():
        figure = _dict(block.get("f1"))
        css = name if name in ("before", "after") else "other"
        means = MEANING.get(name) or (
            f"after, {name.removeprefix('without_')} in mode default" if "without_" in name else ""
        )
        cells = [
            _cell(_get(block, key, "mean"), form)
            for key, form in (
                ("em", ".3f"), ("support_recall", ".3f"), ("support_precision", ".3f"),
                ("searches", ".2f"), ("llm_calls", ".2f"), ("tokens", ",.0f"),
            )
        ]  # fmt: skip
        rows.append(
            f'<tr{" class=key" if css != "other" else ""}><th title="{_e(means)}">{_e(name)}</th>'
            f'<td class="left">{scale.forest(figure, css)}</td>{_cell(_get(figure, "mean"), ".3f")}'
            f'<td class="soft">{_e(_range(figure, ".3f"))}</td>{"".join(cells)}</tr>'
        )
    titles = (
        "F1",
        "95% interval",
        "EM",
        "support<br>recall",
        "support<br>precision",
        "searches",
        "LLM<br>calls",
        "tokens",
    )
    head = f'<th>variant</th><th class="left">{scale.axis()}</th>' + "".join(f"<th>{t}</th>" for t in titles)
    legend = "; ".join(f"{name}: {text}" for name, text in MEANING.items() if name in blocks)
    n = _get(summary, "n")
    count = f"{int(n):,} {what}, greedy. " if n is not None else ""
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        + _note(f"{count}Intervals: bootstrap over questions. {legend}. without_x: after, agent x in mode default.")
    )


def _differences(summary: Json) -> str:
    rows = []
    for name, block in differences(summary).items():
        cells = [_p(_get(block, "f1", "p"))]
        cells += [_cell(_get(block, key, "mean"), "+.3f") for key in ("em", "support_recall")]
        rows.append((name.replace("_minus_", " − "), _dict(block.get("f1")), cells))
    if all(_get(figure, "mean") is None for _, figure, _ in rows):
        return _note("No evaluation yet: there is nothing to compare `after` with.")
    return _forest(rows, ("F1", "95% interval", "p", "EM", "support recall"), "paired over questions") + _note(
        "Right of 0: joint training is better. after − without_x is what agent x is worth to the trained pipeline."
    )


def _lab(ablation: Json, credit: Json) -> list[tuple[str, str, str]]:
    """Return the sections of what `jointrag ablate` and `jointrag credit` measured, where they did."""
    out = []
    if arms := [_dict(r) for r in _list(ablation.get("rows"))]:
        out.append(("ablation", "Ablation", _ablation(arms, _get(ablation, "n"), _get(ablation, "seeds"))))
    if nodes := [_dict(r) for r in _list(credit.get("rows"))]:
        out.append(("credit", "Credit of each node", _credit(nodes, str(credit.get("rule", "")), _get(credit, "n"))))
    return out


def _forest(rows: Sequence[tuple[str, Json, Sequence[str]]], titles: Sequence[str], what: str) -> str:
    """Return a table whose rows draw a signed figure on one axis: (name, figure, further cells)."""
    reach = [v for _, f, _ in rows for v in (*_ends(f), _get(f, "mean")) if v is not None]
    ticks = ticks_of(min(0.0, *reach), max(0.01, *reach), 4) if reach else [0.0, 1.0]
    scale = Scale(ticks[0], ticks[-1], 300, signed=True)
    lines = [
        f'<tr><th>{_e(name)}</th><td class="left">{scale.forest(figure, "after")}</td>'
        f'{_cell(_get(figure, "mean"), "+.3f")}<td class="soft">{_e(_range(figure, "+.3f"))}</td>{"".join(cells)}</tr>'
        for name, figure, cells in rows
    ]
    head = f'<th>{what}</th><th class="left">{scale.axis()}</th>' + "".join(f"<th>{t}</th>" for t in titles)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _ablation(arms: Sequence[Json], n: float | None, seeds: float | None) -> str:
    rows = []
    for arm in arms:
        figure = _dict(arm.get("minus_full"))
        cells = [_p(_get(figure, "p_holm")), _cell(_get(arm, "f1", "mean"), ".3f")]
        cells += [_cell(_get(arm, "searches"), ".2f"), _cell(_get(arm, "tokens"), ",.0f")]
        if figure:
            rows.append((str(arm.get("arm", "")), figure, cells))
    titles = ("F1 − full", "95% interval", "p (Holm)", "F1", "searches", "tokens")
    full = next((arm for arm in arms if not arm.get("minus_full")), {})
    count = f"{int(n or 0):,} questions" + (f", {int(seeds)} seeds" if seeds and seeds > 1 else "")
    note = f"{count}. Full pipeline: F1 {_score(_get(full, 'f1', 'mean'))}. Left of 0: worse than the full pipeline."
    return _forest(rows, titles, "arm") + _note(note)


def _credit(nodes: Sequence[Json], rule: str, n: float | None) -> str:
    rows, examples = [], []
    for node in nodes:
        cells = [_cell(_get(node, key, "mean"), ".1%") for key in ("help", "harm")]
        cells += [_cell(_get(node, "tokens"), ",.0f"), _cell(_get(node, "searches"), ".2f")]
        cells += [_cell(_get(node, "explained_variance"), ".2f"), _cell(_get(node, "advantage_share"), ".0%")]
        rows.append((str(node.get("agent", "")), _dict(node.get("credit")), cells))
        for key, word in (("helped_most", "helped most"), ("hurt_most", "hurt most")):
            told = "".join(_compared(_dict(e)) for e in _list(node.get(key)))
            if told:
                examples.append(f"<h3>{_e(str(node.get('agent', '')))} {word}</h3>{told}")
    titles = ("credit", "95% interval", "helps", "harms", "tokens", "searches", "expl. var.", "advantage")
    of = {"shapley": "what it adds to the team reward, averaged over all orders in which nodes may join"}
    credit = of.get(rule, "team reward with the node minus with its default action, the rest of the graph run again")
    note = (
        f"{int(n or 0):,} held-out questions, greedy; credit by {rule}: {credit}. Helps, harms: share of questions "
        f"that are worse, better with its default action."
    )
    return _forest(rows, titles, "agent") + _note(note) + "".join(examples)


def _compared(example: Json) -> str:
    columns = "".join(_side(name, _dict(example.get(name))) for name in ("with", "without"))
    gain = _get(example, "gain")
    answers = " / ".join(str(a) for a in _list(example.get("answers")))
    return (
        f"<details><summary>{_e(str(example.get('question', '')))} "
        f'<span class="meta">{_e("" if gain is None else _signed(gain))}</span></summary>'
        f'<p class="meta">Gold answer: {_e(answers)}</p><div class="pair">{columns}</div></details>'
    )


def _by_hops(summary: Json) -> str:
    names = [v for v in ("vanilla", "before", "sft_more", "after", "ceiling") if v in variants(summary)]
    out = []
    for group, word in (("f1_by_hops", "hops"), ("f1_by_kind", "kind")):
        keys = list(dict.fromkeys(str(k) for v in names for k in _dict(_dict(summary[v]).get(group))))
        if not keys:
            continue
        rows = []
        for key in keys:
            figures = [_dict(_dict(_dict(summary[v]).get(group)).get(key)) for v in names]
            n = next((c for f in figures if (c := _get(f, "n")) is not None), None)
            cells = "".join(_cell(_get(f, "mean"), ".3f", title=_range(f, ".3f")) for f in figures)
            rows.append(f"<tr><th>{_e(key)}</th>{_cell(n, ',.0f')}{cells}</tr>")
        head = "".join(f"<th>{_e(t)}</th>" for t in (word, "questions", *names))
        out.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        )
    return "".join(out) or _note("No evaluation yet, or questions whose hops are not known.")


def _episodes(records: Sequence[Json]) -> str:
    if not records:
        return _note("No example episodes yet: episodes.jsonl is missing or empty.")
    out = []
    for i, record in enumerate(records):
        sides = {side: _dict(record.get(side)) for side in ("before", "after")}
        scores = " → ".join(_score(_get(s, "f1")) for s in sides.values())
        answers = " / ".join(str(a) for a in _list(record.get("answers")))
        columns = "".join(_side(name, side) for name, side in sides.items())
        out.append(
            f"<details{' open' if i < 3 else ''}><summary>{_e(str(record.get('question', '')))} "
            f'<span class="meta">F1 {_e(scores)}</span></summary>'
            f'<p class="meta">Gold answer: {_e(answers)}</p><div class="pair">{columns}</div></details>'
        )
    return _note("The first questions of the held-out set, not picked. ✓ marks gold passages.") + "".join(out)


def _side(name: str, side: Json) -> str:
    score = _get(side, "f1")
    css = "" if score is None else "right" if score >= 1 else "wrong" if score <= 0 else "partly"
    steps = "".join(_step_item(_dict(step)) for step in _list(side.get("steps")))
    return (
        f'<section><h3>{name}</h3><p class="answer {css}">{_e(str(side.get("answer") or "no answer"))} '
        f'<span class="meta">F1 {_e(_score(score))}</span></p><ol class="steps">{steps}</ol></section>'
    )


def _step_item(step: Json) -> str:
    passages = [p for p in _list(step.get("passages")) if isinstance(p, list) and len(p) == 2]
    if passages:
        items = (f'<li class="gold">{_e(str(t))} ✓</li>' if gold else f"<li>{_e(str(t))}</li>" for t, gold in passages)
        action = f"<ul>{''.join(items)}</ul>"
    else:
        action = f"<span>{_e(str(step.get('action', '')))}</span>"
    if step.get("malformed"):
        action = f'<div>{action} <span class="wrong">malformed: default taken</span></div>'
    return f'<li><span class="node">{_e(str(step.get("node", "")))}</span>{action}</li>'


# charts


@dataclass(frozen=True)
class Series:
    """One line of a chart: points (x, y) in order, `css` its colour."""

    label: str
    css: str
    points: Sequence[tuple[float, float]] = ()
    thin: bool = False
    dots: bool = False


def line_chart(
    title: str,
    series: Sequence[Series],
    width: int,
    height: int,
    y: tuple[float, float] | None = None,
    x_title: str = "",
    best: tuple[float, float] | None = None,
) -> str:
    """Draw lines over a shared x, each named at its end; `best` is ringed. Returns "" without a point."""
    series = [s for s in series if s.points]
    if not series:
        return ""
    xs = [p[0] for s in series for p in s.points]
    ys = [p[1] for s in series for p in s.points]
    lo, hi = y or (min(ys), max(ys))
    ticks = ticks_of(lo, hi, 5 if height > 200 else 3)
    lo, hi = min(lo, ticks[0]), max(hi, ticks[-1])
    named = any(s.label for s in series)
    left, right, top, bottom = 40, (96 if named else 10), 12, (38 if x_title else 20)
    x_lo, x_hi = min(xs), max(xs)

    def at(x: float, value: float) -> tuple[float, float]:
        across = (x - x_lo) / (x_hi - x_lo) if x_hi > x_lo else 0.5
        return left + across * (width - left - right), height - bottom - (value - lo) / (hi - lo) * (
            height - top - bottom
        )

    out = []
    for tick in ticks:
        py = at(x_lo, tick)[1]
        out.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        out.append(f'<text x="{left - 6}" y="{py + 4:.1f}" text-anchor="end">{_tick(tick, ticks)}</text>')
    inner = [t for t in ticks_of(x_lo, x_hi, 6) if x_lo <= t <= x_hi]
    x_ticks = inner if height > 200 and inner else sorted({x_lo, x_hi})  # a small chart has room for its ends only
    for tick in x_ticks:
        px = at(tick, lo)[0]
        anchor = "middle" if height > 200 or x_lo == x_hi else "start" if tick == x_lo else "end"
        out.append(
            f'<text x="{px:.1f}" y="{height - bottom + 16}" text-anchor="{anchor}">{_tick(tick, x_ticks)}</text>'
        )
    if x_title:
        middle = (left + width - right) / 2
        out.append(f'<text x="{middle:.1f}" y="{height - 4}" text-anchor="middle">{_e(x_title)}</text>')
    taken: list[float] = []
    for s in series:
        places = [at(*p) for p in s.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        out.append(f'<polyline class="line {s.css}{" thin" if s.thin else ""}" points="{path}"/>')
        if s.dots or len(places) == 1:
            for (a, b), (x, value) in zip(places, s.points, strict=True):
                out.append(f'<circle class="{s.css}" cx="{a:.1f}" cy="{b:.1f}" r="3">'
                           f"<title>{_tick(x, x_ticks)}: {value:.3f}</title></circle>")  # fmt: skip
    for s in sorted((s for s in series if s.label), key=lambda s: -s.points[-1][1]):  # from the top, none on another
        end_x, end_y = at(*s.points[-1])
        end_y = max([end_y, *(t + 15 for t in taken)])
        taken.append(end_y)
        out.append(f'<text class="{s.css}" x="{end_x + 8:.1f}" y="{end_y + 4:.1f}">{_e(s.label)}</text>')
    if best:
        a, b = at(*best)
        side = ("end", -10) if a > width / 2 else ("start", 10)
        out.append(f'<circle class="ring" cx="{a:.1f}" cy="{b:.1f}" r="7"/>')
        out.append(f'<text class="strong" x="{a + side[1]:.1f}" y="{max(11.0, b - 10):.1f}" '
                   f'text-anchor="{side[0]}">best {best[1]:.3f}</text>')  # fmt: skip
    return _svg(title, width, height, out)


def _small(title: str, series: Sequence[Series]) -> str:
    """A small chart under its title and last value."""
    chart = line_chart(title, series, 320, 130)
    last = f" <b>{series[0].points[-1][1]:.3f}</b>" if series[0].points else ""
    return f"<div><p>{_e(title)}{last}</p>{chart or _note('not logged')}</div>"


@dataclass(frozen=True)
class Scale:
    """A horizontal axis that the rows of a table share: each row draws its interval on it."""

    lo: float
    hi: float
    width: int
    signed: bool = False  # differences: + and a line at 0

    @property
    def ticks(self) -> list[float]:
        """Return the round numbers inside the axis."""
        return [t for t in ticks_of(self.lo, self.hi, 4) if self.lo <= t <= self.hi]

    def at(self, value: float) -> float:
        """Return where a value lies, kept inside the axis."""
        return 16 + (min(max(value, self.lo), self.hi) - self.lo) / (self.hi - self.lo) * (self.width - 32)

    def axis(self) -> str:
        """Draw the numbers, for the head of the table."""
        form = "+.3g" if self.signed else ".3g"
        marks = []
        for t in self.ticks:
            number = format(t, form).replace("-", "−") if t else "0"
            marks.append(f'<text x="{self.at(t):.1f}" y="12" text-anchor="middle">{number}</text>')
        return _svg("F1", self.width, 16, marks)

    def forest(self, figure: Json, css: str) -> str:
        """Draw a mean as a dot on its interval; nothing where it is missing."""
        mean, (lo, hi) = _get(figure, "mean"), _ends(figure)
        out = [
            f'<line class="{"axis" if t == 0 and self.signed else "grid"}" x1="{self.at(t):.1f}" '
            f'x2="{self.at(t):.1f}" y1="0" y2="32"/>'
            for t in self.ticks
        ]
        label = "no value"
        if mean is not None:
            label = f"{mean:.3f}"
            if lo is not None and hi is not None:
                label += f", interval {lo:.3f} to {hi:.3f}"
                out.append(f'<line class="line {css}" x1="{self.at(lo):.1f}" x2="{self.at(hi):.1f}" y1="16" y2="16"/>')
            out.append(f'<circle class="{css}" cx="{self.at(mean):.1f}" cy="16" r="4"/>')
        return _svg(label, self.width, 32, out)


def ticks_of(lo: float, hi: float, count: int) -> list[float]:
    """Round numbers at a step of 1, 2 or 5 x 10^k that cover [lo, hi]; at least two."""
    if hi - lo < 1e-12:
        lo, hi = lo - (abs(lo) * 0.1 or 0.5), hi + (abs(hi) * 0.1 or 0.5)
    step = _nice((hi - lo) / count)
    first, last = math.floor(lo / step + 1e-9), math.ceil(hi / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _nice(step: float) -> float:
    """The smallest of 1, 2, 5 x 10^k that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9))


def _tick(value: float, ticks: Sequence[float]) -> str:
    """A tick's number, with as many decimals as the step needs."""
    step = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}".replace("-", "−")


def _svg(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
        f"<title>{_e(title)}</title>{''.join(parts)}</svg>"
    )


# the graph


@dataclass
class Drawn:
    """Nodes (id -> label) and edges (source, target, label, conditional) of a mermaid flowchart."""

    nodes: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str, str, bool]] = field(default_factory=list)


_NODE = re.compile(r"(\S+?)(?:\(\[(.+)\]\)|\((.+)\)|\[(.+)\]|\{(.+)\})(?::::?\w+)?;?")
_EDGE = re.compile(r"(\S+)\s+(?:-->|-\.->|-\.\s*(?P<maybe>.*?)\s*\.->|--\s*(?P<text>.*?)\s*-->)\s+(\S+?);?")


def parse_mermaid(text: str) -> Drawn | None:
    """Read the flowchart that LangGraph draws; None where a line is not understood, rather than a wrong drawing."""
    out, groups, inside = Drawn(), list[str](), False
    for raw in text.splitlines():
        line = raw.strip()
        if not inside:
            inside = bool(re.match(r"(graph|flowchart)\s+[A-Z]{2}\b", line))
        elif not line or line.startswith(("classDef", "%%")):
            continue
        elif line.startswith("subgraph "):
            groups.append(_plain(line.removeprefix("subgraph ")))
        elif line == "end" and groups:
            groups.pop()
        elif edge := _EDGE.fullmatch(line):
            label = _plain(edge["maybe"] or edge["text"] or "")
            out.edges.append((edge[1], edge[4], label, "-." in line))
        elif node := _NODE.fullmatch(line):
            label = _plain(next(g for g in node.groups()[1:] if g is not None))
            out.nodes[node[1]] = " / ".join([*groups, label])
        else:
            return None
    known = all(a in out.nodes and b in out.nodes for a, b, _, _ in out.edges)
    return out if out.edges and known and len(out.nodes) <= 40 else None


def _plain(label: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", label)).split())


def _graph(text: str) -> str:
    if not text.strip():
        return _note("No graph.mermaid in this folder.")
    drawn = parse_mermaid(text)
    if drawn is None:
        return f"<pre>{_e(text)}</pre>"
    return f'<figure class="scroll">{draw_graph(drawn)}</figure>' + _note("Dashed: taken on a condition.")


def draw_graph(drawn: Drawn) -> str:
    """Draw left to right: a node stands one column after the last that leads to it, edges back run above."""
    back = _back_edges(drawn)
    forward = [(a, b) for a, b, _, _ in drawn.edges if (a, b) not in back]
    layer = dict.fromkeys(drawn.nodes, 0)
    for _ in drawn.nodes:  # longest path; as many rounds as there can be columns
        for a, b in forward:
            layer[b] = max(layer[b], layer[a] + 1)
    slot: dict[str, int] = {}
    taken: set[tuple[int, int]] = set()
    for node in sorted(drawn.nodes, key=lambda n: layer[n]):  # a stable sort: mermaid's order within a column
        wanted = min((slot[a] for a, b in forward if b == node and a in slot), default=0)
        while (layer[node], wanted) in taken:
            wanted += 1
        slot[node] = wanted
        taken.add((layer[node], wanted))
    wide = {n: 7.2 * len(label) + 26 for n, label in drawn.nodes.items()}
    columns = [max(wide[n] for n in drawn.nodes if layer[n] == k) for k in range(max(layer.values()) + 1)]
    start = [8 + sum(columns[:k]) + 64 * k for k in range(len(columns))]
    spans = [abs(layer[a] - layer[b]) + 1 for a, b, _, _ in drawn.edges if (a, b) in back or layer[b] - layer[a] > 1]
    top = 30 + 16 * max(spans, default=0)
    x = {n: start[layer[n]] + columns[layer[n]] / 2 for n in drawn.nodes}
    y = {n: top + 64 * slot[n] for n in drawn.nodes}
    out = ['<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
           '<path class="tip" d="M0,0 L8,4 L0,8 Z"/></marker></defs>']  # fmt: skip
    for a, b, label, maybe in drawn.edges:
        over = (a, b) in back or (layer[b] - layer[a] > 1 and slot[a] == slot[b])
        if over:
            rise = 16.0 + 14 * (abs(layer[a] - layer[b]) + 1)
            ax, bx, ay, by = x[a], x[b], y[a] - 17, y[b] - 18
            if a == b:
                ax, bx = ax - 14, bx + 14
            elif (a, b) not in back:  # a skip ahead runs below the way back between the same two
                ax, bx, rise = ax + 12, bx - 12, rise * 0.6
            peak = min(ay, by) - rise
            path = f"M{ax:.1f},{ay:.1f} C{ax:.1f},{peak:.1f} {bx:.1f},{peak:.1f} {bx:.1f},{by:.1f}"
            place = ((ax + bx) / 2, peak + rise * 0.25 - 4)
        else:
            ax, bx, ay, by = x[a] + wide[a] / 2, x[b] - wide[b] / 2 - 1, y[a], y[b]
            bend = (bx - ax) / 2
            path = f"M{ax:.1f},{ay:.1f} C{ax + bend:.1f},{ay:.1f} {bx - bend:.1f},{by:.1f} {bx:.1f},{by:.1f}"
            place = ((ax + bx) / 2, (ay + by) / 2 + (-6 if ay == by else 4))
        out.append(f'<path class="edge{" maybe" if maybe else ""}" d="{path}" marker-end="url(#tip)"/>')
        if label:
            out.append(
                f'<text class="halo" x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="middle">{_e(label)}</text>'
            )
    for node, label in drawn.nodes.items():
        end = node in ("__start__", "__end__")
        w = wide[node]
        out.append(
            f'<rect class="{"end" if end else "node"}" x="{x[node] - w / 2:.1f}" y="{y[node] - 17:.1f}" '
            f'width="{w:.1f}" height="34" rx="{17 if end else 6}"/><text class="{"" if end else "strong"}" '
            f'x="{x[node]:.1f}" y="{y[node] + 4:.1f}" text-anchor="middle">{_e(label.strip("_"))}</text>'
        )
    return _svg("The graph", start[-1] + columns[-1] + 8, max(y.values()) + 30, out)


def _back_edges(drawn: Drawn) -> set[tuple[str, str]]:
    """The edges that close a loop in a walk from the start, in mermaid's order."""
    following: dict[str, list[str]] = {n: [] for n in drawn.nodes}
    for a, b, _, _ in drawn.edges:
        following[a].append(b)
    back: set[tuple[str, str]] = set()
    done: set[str] = set()

    def walk(node: str, above: tuple[str, ...]) -> None:
        for target in following[node]:
            if target in (*above, node):
                back.add((node, target))
            elif target not in done:
                walk(target, (*above, node))
        done.add(node)

    for node in sorted(drawn.nodes, key=lambda n: n != "__start__"):
        if node not in done:
            walk(node, ())
    return back


# reading what there is


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file; a line cut short by a kill is left out."""
    out = []
    for line in _text(path).splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            out.append(value)
    return out


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _get(value: object, *keys: str) -> float | None:
    """The finite number under these keys, else None."""
    for key in keys:
        value = _dict(value).get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _numbers(values: Json) -> list[float]:
    return [v for key in values if (v := _get(values, key)) is not None]


def _ends(figure: Json) -> tuple[float | None, float | None]:
    ends = dict(zip(("lo", "hi"), _list(figure.get("interval")), strict=False))
    return _get(ends, "lo"), _get(ends, "hi")


def _x(metrics: Sequence[Json]) -> list[float]:
    """Episodes so far where every line has them, in order; else the number of the update, else of the line."""
    for key in ("episodes", "update"):
        found = [_get(line, key) for line in metrics]
        values = [v for v in found if v is not None]
        if len(values) == len(metrics) and all(a < b for a, b in pairwise(values)):
            return values
    return [float(i + 1) for i in range(len(metrics))]


def _axis(metrics: Sequence[Json]) -> str:
    x = _x(metrics)
    return next(
        (key for key in ("episodes", "update") if [_get(line, key) for line in metrics] == x), "update"
    ).replace("update", "updates")


def _points(metrics: Sequence[Json], x: Sequence[float], *keys: str) -> list[tuple[float, float]]:
    return [(a, v) for a, line in zip(x, metrics, strict=True) if (v := _get(line, *keys)) is not None]


def _e(text: str) -> str:
    return html.escape(text, quote=True)


def _note(text: str) -> str:
    return f'<p class="note">{_e(text)}</p>'


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _range(figure: Json, form: str) -> str:
    lo, hi = _ends(figure)
    return "–" if lo is None or hi is None else f"[{lo:{form}}, {hi:{form}}]".replace("-", "−")


def _p(p: float | None) -> str:
    return f"<td>{'–' if p is None else '&lt; 0.001' if p < 0.001 else f'{p:.3f}'}</td>"


def _cell(value: float | None, form: str, title: str = "") -> str:
    text = "–" if value is None else format(value, form).replace("-", "−")
    return f'<td title="{_e(title)}">{text}</td>' if title else f"<td>{text}</td>"

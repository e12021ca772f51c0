"""Evaluation: a pipeline in several variants on the same held-out questions, as rows, a summary and a table.

A row is one question and variant; the summary (eval.json) is the mean of each column with its bootstrap interval over
questions, and differences between variants paired by question. Acting is greedy and no clock is read: the same seed
gives the same bytes. A column's mean leaves out the questions that have no value in it (no gold passages: no support
recall); where no question has one, the figure's mean is null.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jointrag.data.errors import DataError, StorageError
from jointrag.data.files import read_questions
from jointrag.data.types import Question
from jointrag.eval.metrics import cover_em, exact_match, f1, support
from jointrag.eval.statistics import as_json, bootstrap_means, paired_differences
from jointrag.graph.episode import Episode

if TYPE_CHECKING:  # they import torch
    from jointrag.agents.base import Agent
    from jointrag.graph.pipeline import Pipeline

Row = dict[str, Any]  # one question and variant, a line of eval.rows.jsonl
Modes = dict[str, str]  # agent -> mode; absent = learn

# Columns of a row that the summary averages; a question without gold has None in those that need it.
ANSWER = ("f1", "em", "cover_em")
SUPPORT = ("support_recall", "support_precision", "support_f1")  # of what the answerer saw
RETRIEVED = ("retrieved_recall", "retrieved_precision", "retrieved_f1")  # of what the retriever found, all hops
COST = ("searches", "llm_calls", "tokens", "dropped")
COMPARED = ("f1", "em", "cover_em", "support_recall", "support_precision", "searches")  # in the paired differences
ORDER = ("vanilla", "trunk", "before", "sft_more", "after", "without_", "ceiling", "oracle")  # of the blocks
BANK = "held_out_bank"  # block of eval.json: before and after on the test world in wordings never trained on
NOTHING = {"mean": None, "interval": [None, None]}  # the figure of a column in which no question has a value


# rows


def rows_of(variant: str, episodes: Iterable[Episode]) -> list[Row]:
    """Score finished episodes; rows are parallel to them."""
    return [_row(variant, episode) for episode in episodes]


def _row(variant: str, episode: Episode) -> Row:
    question, answers = episode.question, list(episode.question.answers)
    agents = dict.fromkeys(d.agent for d in episode.decisions)
    row: Row = {
        "variant": variant,
        "id": question.id,
        "question": question.question,
        "kind": question.kind,
        "hops": question.hops,
        "answers": answers,
        "answer": episode.answer,
        "f1": f1(episode.answer, answers) if answers else None,
        "em": exact_match(episode.answer, answers) if answers else None,
        "cover_em": cover_em(episode.answer, answers) if answers else None,
    }
    for names, ids in ((SUPPORT, episode.kept), (RETRIEVED, episode.retrieved)):
        found = support(ids, question.supporting_ids)
        row |= dict(zip(names, (found.recall, found.precision, found.f1) if found else (None,) * 3, strict=True))
    return row | {
        "searches": episode.searches,
        "llm_calls": episode.llm_calls,
        "tokens": episode.tokens,
        "malformed": {a: sum(d.malformed for d in episode.of(a)) for a in agents},
        "calls": {a: sum(d.completion is not None for d in episode.of(a)) for a in agents},
        "dropped": sum(d.dropped for d in episode.decisions),
        "error": episode.error or next((d.failed for d in episode.decisions if d.failed), ""),
    }


# variants


def variant_modes(
    agents: Sequence[Agent], fixed: Mapping[str, str] | None = None, answerer: str = "warm"
) -> dict[str, Modes]:
    """Return block of eval.json -> mode of each agent, for any graph: what an agent writes tells its role.

    fixed: agents that the config holds in a mode of their own (an ablation's filter: default); they keep it wherever
    the warm or the trained pipeline is measured. answerer: how the answerer, and agents of no shipped role, act in
    `ceiling`, warm or learn. `sft_more` is `after` with other heads loaded and has no modes of its own.
    """
    held = {name: mode for name, mode in (fixed or {}).items() if mode not in ("learn", "frozen")}
    names = [a.name for a in agents]
    answers = [a.name for a in agents if "answer" in a.writes]
    gathers = [
        a.name
        for a in agents
        if a.name not in answers and {"queries", "pending", "passages", "evidence"} & set(a.writes)
    ]
    warm = {n: held.get(n, "warm") for n in names}
    return {
        "vanilla": {n: warm[n] if n in answers else "default" for n in names},
        "trunk": dict.fromkeys(names, "trunk"),
        "before": warm,
        "after": dict(held),
        **{f"without_{n}": {**held, n: "default"} for n in names},
        "ceiling": {n: "oracle" if n in gathers else held.get(n, answerer) for n in names},
        "oracle": dict.fromkeys(names, "oracle"),
    }


def run_variant(
    pipeline: Pipeline,
    name: str,
    questions: Sequence[Question],
    modes: Mapping[str, str],
    oracle_form: str = "sub_question",
    progress: Callable[[int], None] | None = None,
    watch: Callable[[str, list[Episode]], None] | None = None,
) -> list[Row]:
    """Answer the questions greedily in these modes and score them; `watch` sees the episodes before they go."""
    episodes = pipeline.run(questions, modes=modes, sample=False, oracle_form=oracle_form, progress=progress)
    if watch:
        watch(name, episodes)
    return rows_of(name, episodes)


def run_variants(
    pipeline: Pipeline,
    questions: Sequence[Question],
    form: str,
    fixed: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    progress: Callable[[str, int], None] | None = None,
    watch: Callable[[str, list[Episode]], None] | None = None,
) -> dict[str, list[Row]]:
    """Run every variant of `variant_modes` (those named in `only`); `form` is the warm start's label form.

    The ceiling's oracles ask in `form`, with the warm and with the trained answerer; the better mean F1 counts.
    """
    out: dict[str, list[Row]] = {}

    def run(name: str, modes: Modes, oracle_form: str) -> list[Row]:
        counter = (lambda done: progress(name, done)) if progress else None
        return run_variant(pipeline, name, questions, modes, oracle_form, counter, watch)

    wanted = None if only is None else set(only)
    trained = variant_modes(pipeline.agents, fixed, answerer="learn")
    for name, modes in variant_modes(pipeline.agents, fixed).items():
        if wanted is not None and name not in wanted:
            continue
        out[name] = run(name, modes, form if name == "ceiling" else "sub_question")
        if name == "ceiling" and trained[name] != modes:
            out[name] = max(out[name], run(name, trained[name], form), key=_mean_f1)  # equal: the warm one
    return out


def _mean_f1(rows: list[Row]) -> float:
    scores = [r["f1"] for r in rows if r["f1"] is not None]
    return sum(scores) / len(scores) if scores else 0.0


# summary


def summarise(rows: Mapping[str, Sequence[Row]], seed: int = 0, resamples: int = 10_000) -> dict[str, Any]:
    """Return eval.json: `n`, `seed`, a block a variant, and the paired differences of `after` to the others.

    Every column of as many questions shares one set of bootstrap indices. Variants have to hold the same questions in
    the same order: pairing others would take the spread between questions for a difference.
    """
    given = {name: list(rows[name]) for name in _ordered(rows) if rows[name]}
    if not given:
        raise DataError("rows: got no evaluated question, expected at least one variant; evaluate some questions first")
    check_same_questions(given)
    figures = _Figures()
    out: dict[str, Any] = {"n": len(next(iter(given.values()))), "seed": seed}
    out |= {name: _block(block, figures) for name, block in given.items()}
    if "after" in given:
        for name in given:
            if name in ("before", "sft_more") or name.startswith("without_"):
                out[f"after_minus_{name}"] = {
                    column: figures.difference(given["after"], given[name], column) for column in COMPARED
                }
    figures.fill(seed, resamples)
    return out


def check_same_questions(rows: Mapping[str, Sequence[Row]]) -> None:
    """Refuse rows of variants that answered different questions: they cannot be paired."""
    for first, name in pairwise(rows):
        if [r["id"] for r in rows[name]] != [r["id"] for r in rows[first]]:
            raise DataError(
                f"rows: got other questions in {name!r} ({len(rows[name])}) than in {first!r} ({len(rows[first])}), "
                "expected the same ones in the same order; evaluate all variants on one list of questions"
            )


def _ordered(names: Iterable[str]) -> list[str]:
    def place(name: str) -> int:
        known = "without_" if name.startswith("without_") else name
        return ORDER.index(known) if known in ORDER else len(ORDER)

    return sorted(names, key=place)


def _block(rows: Sequence[Row], figures: _Figures) -> dict[str, Any]:
    agents = dict.fromkeys(a for r in rows for a in r["calls"])
    hops = sorted({r["hops"] for r in rows if r["hops"]})  # 0 = unknown
    kinds = sorted({r["kind"] for r in rows if r["kind"]})
    return {
        **{c: figures.mean(r[c] for r in rows) for c in (*ANSWER, *SUPPORT, *RETRIEVED, *COST)},
        # share of questions on which a node or a tool failed
        "failed": figures.mean(float(bool(r["error"])) for r in rows),
        # share of an agent's calls, mean over the questions that called it
        "malformed": {
            a: figures.mean(r["malformed"][a] / r["calls"][a] if r["calls"].get(a) else None for r in rows)
            for a in agents
        },
        "f1_by_hops": {str(h): figures.mean((r["f1"] for r in rows if r["hops"] == h), count=True) for h in hops},
        "f1_by_kind": {k: figures.mean((r["f1"] for r in rows if r["kind"] == k), count=True) for k in kinds},
    }


class _Figures:
    """Hands out empty figures and fills them together: one bootstrap for all columns of the same length."""

    def __init__(self) -> None:
        self._means: dict[int, list[tuple[dict[str, Any], list[float]]]] = {}
        self._differences: dict[int, list[tuple[dict[str, Any], list[float], list[float]]]] = {}

    def mean(self, values: Iterable[float | None], count: bool = False) -> dict[str, Any]:
        have = [float(v) for v in values if v is not None]
        figure: dict[str, Any] = dict(NOTHING)
        if have:
            self._means.setdefault(len(have), []).append((figure, have))
        if count:
            figure["n"] = len(have)
        return figure

    def difference(self, a: Sequence[Row], b: Sequence[Row], column: str) -> dict[str, Any]:
        pairs = [(x[column], y[column]) for x, y in zip(a, b, strict=True)]
        have = [(float(x), float(y)) for x, y in pairs if x is not None and y is not None]
        figure: dict[str, Any] = {**NOTHING, "p": None}
        if have:
            self._differences.setdefault(len(have), []).append((figure, [x for x, _ in have], [y for _, y in have]))
        return figure

    def fill(self, seed: int, resamples: int) -> None:
        for columns in self._means.values():
            matrix_NM = list(zip(*(values for _, values in columns), strict=True))
            for (figure, _), found in zip(columns, bootstrap_means(matrix_NM, resamples, seed=seed), strict=True):
                figure.update(as_json(found))
        for pairs in self._differences.values():
            a_NM, b_NM = (list(zip(*(pair[side] for pair in pairs), strict=True)) for side in (1, 2))
            compared = paired_differences(a_NM, b_NM, resamples, seed=seed, permutations=resamples)
            for (figure, _, _), difference in zip(pairs, compared, strict=True):
                figure.update(as_json(difference))


# what people read


def table(summary: Mapping[str, Any]) -> str:
    """Return the variants as an aligned table, one a line, then the differences, for a terminal.

    `held_out_bank`, a summary of its own over the held-out wordings, follows as a second table.
    """
    lines = [["variant", "F1", "95% interval", "EM", "support recall", "searches", "LLM calls", "tokens"]]
    for name, block in variants(summary).items():
        cells = [_number(block, c, f) for c, f in _CELLS]
        lines.append([name, cells[0], _interval(block.get("f1"), ".3f"), *cells[1:]])
    out = [_questions(summary["n"]), "", *aligned(lines)]
    compared = [["paired over questions", "F1", "95% interval", "p", "EM", "support recall"]]
    for name, difference in differences(summary).items():
        figure = difference.get("f1") or {}
        compared.append(
            [
                name.replace("_minus_", " - "),
                _number(difference, "f1", "+.3f"),
                _interval(figure, "+.3f"),
                small(figure.get("p")),
                _number(difference, "em", "+.3f"),
                _number(difference, "support_recall", "+.3f"),
            ]
        )
    if len(compared) > 1:
        out += ["", *aligned(compared)]
    closed = gap_closed(summary)
    if closed is not None:
        out += ["", f"joint training closes {closed:.0%} of the way from before to ceiling"]
    if summary.get(BANK):
        out += ["", "the same in held-out wordings:", table(summary[BANK])]
    return "\n".join(out)


_CELLS = (
    ("f1", ".3f"),
    ("em", ".3f"),
    ("support_recall", ".3f"),
    ("searches", ".2f"),
    ("llm_calls", ".2f"),
    ("tokens", ",.0f"),
)


def variants(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the blocks of eval.json that are variants, in its order."""
    return {k: v for k, v in summary.items() if isinstance(v, Mapping) and "f1" in v and "_minus_" not in k}


def differences(summary: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the blocks of eval.json that are paired differences, in its order."""
    return {k: v for k, v in summary.items() if isinstance(v, Mapping) and "_minus_" in k}


def gap_closed(summary: Mapping[str, Any]) -> float | None:
    """Return (after - before) / (ceiling - before) of F1; None where one is missing or there is no gap."""
    found = [((summary.get(name) or {}).get("f1") or {}).get("mean") for name in ("before", "after", "ceiling")]
    before, after, ceiling = found
    if before is None or after is None or ceiling is None or ceiling - before < 1e-9:
        return None
    return float((after - before) / (ceiling - before))


def _questions(n: int) -> str:
    return f"{n:,} question{'' if n == 1 else 's'}"


def _number(block: Mapping[str, Any], column: str, form: str) -> str:
    mean = (block.get(column) or {}).get("mean")
    return "-" if mean is None else format(mean, form)


def _interval(figure: Mapping[str, Any] | None, form: str) -> str:
    lo, hi = (figure or {}).get("interval") or (None, None)
    return "-" if lo is None or hi is None else f"[{lo:{form}}, {hi:{form}}]"


def small(p: float | None) -> str:
    """Return a p-value as people read it."""
    return "-" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]


# the public function


@dataclass(frozen=True)
class Report:
    """What `evaluate` found: `rows`, one a question; `summary`, each metric with its interval. Prints as a table."""

    rows: list[Row]
    summary: dict[str, Any]

    def __str__(self) -> str:
        block, lines = self.summary, [["metric", "mean", "95% interval"]]
        for column in (*ANSWER, *SUPPORT, *RETRIEVED, *COST, "failed"):
            form = ",.1f" if column in COST else ".3f"
            lines.append([column.replace("_", " "), _number(block, column, form), _interval(block[column], form)])
        for group, word in (("malformed", "malformed"), ("f1_by_hops", "f1, hops"), ("f1_by_kind", "f1, kind")):
            for key, figure in block[group].items():
                n = f" (n={figure['n']})" if "n" in figure else ""
                lines.append([f"{word} {key}{n}", _number(block[group], key, ".3f"), _interval(figure, ".3f")])
        return "\n".join([_questions(block["n"]), "", *aligned(lines)])


def evaluate(
    pipeline: Pipeline,
    questions: str | Path | Sequence[Question],
    modes: Mapping[str, str] | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Report:
    """Answer `questions` (a jsonl file, or Question objects) greedily and score them, intervals by bootstrap.

    modes: agent -> mode, for what an agent is worth: {"filter": "default"}; agents not named act as they have learnt.
    """
    if isinstance(questions, str | Path):
        questions = read_questions(questions, set(pipeline.index.ids))
    if not questions:
        raise DataError("questions: got none, expected at least one; give a question file or Question objects")
    rows = run_variant(pipeline, "evaluate", questions, dict(modes or {}))
    summary = summarise({"evaluate": rows}, seed, resamples)
    block = summary.pop("evaluate")
    return Report(rows, {**summary, **block})


# files


def write_json_atomic(path: Path, value: Any) -> None:
    """Write JSON, keys in the order given; a reader sees the old file or the new one, never half of it."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_rows(path: Path, rows: Mapping[str, Sequence[Row]]) -> None:
    """Write eval.rows.jsonl: one question and variant a line, variants in the order of eval.json."""
    write_jsonl_atomic(path, (row for name in _ordered(rows) for row in rows[name]))


def read_rows(path: Path) -> dict[str, list[Row]]:
    """Return rows by variant, as `write_rows` wrote them."""
    out: dict[str, list[Row]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        out.setdefault(row["variant"], []).append(row)
    return out


def write_jsonl_atomic(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    write_text_atomic(path, "".join(json.dumps(x, ensure_ascii=False, allow_nan=False) + "\n" for x in lines))


def write_text_atomic(path: Path, text: str) -> None:
    """Write text beside `path`, flush it to disk, rename it."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        why = error.strerror or str(error)
        raise StorageError(
            f"{path}: got {why!r}, expected a folder with room to write to; free space, or set another `out`"
        ) from error

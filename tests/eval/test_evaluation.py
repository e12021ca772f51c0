"""Rows, summary, table and variants, on episodes made by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jointrag.data.errors import DataError, StorageError
from jointrag.data.types import Passage, Question
from jointrag.eval.evaluation import (
    Report,
    evaluate,
    gap_closed,
    rows_of,
    run_variants,
    summarise,
    table,
    variant_modes,
    variants,
    write_json_atomic,
    write_rows,
)
from jointrag.graph.episode import Decision, Episode
from jointrag.llm.types import Completion, Request

ASKED = Request(key=(), role="", head=None, context=(1, 2, 3, 4, 5), suffix=(6, 7))  # 7 tokens read
SAID = Completion(tokens=(8, 9, 10), logprobs=(0.0,) * 3, masks=())  # 3 written
PASSAGES = {i: Passage(i, f"Title {i}", "") for i in "abcdef"}
QUESTION = Question("q1", "who?", ("Ann Lee", "Lee"), ("a", "b"), hops=2, kind="bridge")


def decide(agent: str, asked: bool = True, **fields: Any) -> Decision:
    request, completion = (ASKED, SAID) if asked else (None, None)
    return Decision(agent, agent, 0, 0, 0, "learn", None, request=request, completion=completion, **fields)


def episode(
    question: Question = QUESTION, answer: str = "Ann", found: str = "abcd", kept: str = "ac", malformed: bool = False
) -> Episode:
    """One search round: rewriter asks two queries, retriever finds, filter keeps (without the model), answerer."""
    passages, evidence = [PASSAGES[i] for i in found], [PASSAGES[i] for i in kept]
    return Episode(
        question,
        seed=0,
        decisions=[
            decide("rewriter", malformed=malformed, update={"pending": ["x", "y"]}, dropped=1),
            decide("retriever", searches=2, update={"passages": passages}),
            decide("filter", asked=False, update={"evidence": evidence}),
            decide("rewriter", update={"pending": []}),
            decide("answerer", update={"answer": answer}, dropped=2),
        ],
        state={"answer": answer, "evidence": evidence},
    )


class Role:
    def __init__(self, name: str, *writes: str) -> None:
        self.name, self.writes = name, writes


ROLES: Any = [
    Role("rewriter", "queries", "pending"),
    Role("retriever", "passages", "hop"),
    Role("filter", "evidence"),
    Role("answerer", "answer"),
]


class Scripted:
    """A pipeline whose answer depends on the answerer's mode alone."""

    agents: ClassVar[Any] = ROLES

    class index:
        ids: ClassVar[list[str]] = ["a", "b"]

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers, self.forms = answers, list[str]()

    def run(
        self, questions: Sequence[Question], *, modes: Mapping[str, str], oracle_form: str, **_: Any
    ) -> list[Episode]:
        self.forms.append(oracle_form)
        return [episode(q, self.answers[modes.get("answerer", "learn")]) for q in questions]


# rows


def test_a_row_holds_the_scores_and_costs_of_one_episode() -> None:
    (row,) = rows_of("after", [episode(malformed=True)])
    # answer "Ann" against "Ann Lee": P = 1, R = 1/2, F1 = 2/3; against "Lee": 0
    # kept {a, c}, gold {a, b}: one hit of two each way; found {a, b, c, d}: R = 2/2, P = 2/4, F1 = 2/3
    # 4 calls of 7 + 3 tokens
    assert row == {
        "variant": "after",
        "id": "q1",
        "question": "who?",
        "kind": "bridge",
        "hops": 2,
        "answers": ["Ann Lee", "Lee"],
        "answer": "Ann",
        "f1": pytest.approx(2 / 3),
        "em": 0.0,
        "cover_em": 0.0,
        "support_recall": 0.5,
        "support_precision": 0.5,
        "support_f1": 0.5,
        "retrieved_recall": 1.0,
        "retrieved_precision": 0.5,
        "retrieved_f1": pytest.approx(2 / 3),
        "searches": 2,
        "llm_calls": 4,
        "tokens": 40,
        "malformed": {"rewriter": 1, "retriever": 0, "filter": 0, "answerer": 0},
        "calls": {"rewriter": 2, "retriever": 1, "filter": 0, "answerer": 1},
        "dropped": 3,
        "error": "",
    }


def test_a_question_without_gold_has_no_score() -> None:
    (row,) = rows_of("after", [episode(Question("q", "who?", ()))])
    names = ("f1", "em", "cover_em", "support_recall", "support_f1", "retrieved_recall", "retrieved_precision")
    assert [row[name] for name in names] == [None] * 7


def test_a_failed_episode_scores_zero_and_says_why() -> None:
    (row,) = rows_of("after", [Episode(QUESTION, 0, error="KeyError: 'x'")])
    assert (row["f1"], row["support_recall"], row["calls"], row["error"]) == (0.0, 0.0, {}, "KeyError: 'x'")


# summary


def rows_by_hand() -> dict[str, list[dict[str, Any]]]:
    """Four questions; before answers one of them, after three, without the filter two."""
    questions = [
        Question("q1", "one?", ("Ann",), ("a", "b"), hops=1, kind="bridge"),
        Question("q2", "two?", ("Ann",), ("a",), hops=2, kind="bridge"),
        Question("q3", "three?", ("Ann",), (), hops=2, kind="date"),  # no gold passages
        Question("q4", "four?", ("Ann",), ("e",)),  # neither hops nor kind known
    ]

    def variant(name: str, right: str) -> list[dict[str, Any]]:
        return rows_of(
            name,
            [
                episode(q, "Ann" if q.id[1] in right else "Bob", malformed=name == "before" and q.id == "q1")
                for q in questions
            ],
        )

    return {
        "oracle": variant("oracle", "1234"),
        "after": variant("after", "123"),
        "without_filter": variant("without_filter", "12"),
        "before": variant("before", "1"),
        "ceiling": variant("ceiling", "1234"),
        "sft_more": variant("sft_more", "12"),
        "vanilla": variant("vanilla", ""),
    }


def test_the_summary_holds_each_block_with_means_over_the_questions_that_have_a_value() -> None:
    summary = summarise(rows_by_hand(), seed=3, resamples=200)
    assert list(summary) == [
        *("n", "seed", "vanilla", "before", "sft_more", "after", "without_filter", "ceiling", "oracle"),
        *("after_minus_before", "after_minus_sft_more", "after_minus_without_filter"),
    ]
    assert (summary["n"], summary["seed"]) == (4, 3)
    before, after = summary["before"], summary["after"]
    assert (before["f1"]["mean"], after["f1"]["mean"]) == (0.25, 0.75)
    assert after["f1"]["interval"][0] < 0.75 < after["f1"]["interval"][1]
    assert after["support_recall"]["mean"] == 0.5  # kept {a, c}: 1/2, 1, left out, 0
    assert (after["searches"]["mean"], after["tokens"]["mean"], after["failed"]["mean"]) == (2.0, 40.0, 0.0)
    assert before["malformed"]["rewriter"]["mean"] == 0.125  # one of q1's two calls, over four questions
    assert before["malformed"]["filter"] == {"mean": None, "interval": [None, None]}  # never called
    assert {k: (v["mean"], v["n"]) for k, v in after["f1_by_hops"].items()} == {"1": (1.0, 1), "2": (1.0, 2)}
    assert {k: (v["mean"], v["n"]) for k, v in before["f1_by_kind"].items()} == {"bridge": (0.5, 2), "date": (0.0, 1)}


def test_differences_are_paired_by_question() -> None:
    summary = summarise(rows_by_hand(), resamples=200)
    gain = summary["after_minus_before"]["f1"]  # 0, 1, 1, 0
    assert gain["mean"] == 0.5
    assert 0.3 < gain["p"] <= 1  # of the sign flips of two 1s, half are as extreme: |+1 +1| of 4 patterns
    assert summary["after_minus_before"]["support_recall"]["mean"] == 0.0
    assert summary["after_minus_without_filter"]["em"]["mean"] == 0.25


def test_a_set_without_gold_passages_has_null_support() -> None:
    rows = {v: rows_of(v, [episode(Question("q", "?", ("Ann",)))]) for v in ("before", "after")}
    summary = summarise(rows, resamples=10)
    assert summary["after"]["support_recall"] == {"mean": None, "interval": [None, None]}
    assert summary["after_minus_before"]["support_recall"] == {"mean": None, "interval": [None, None], "p": None}
    assert " - " in table(summary)


def test_the_summary_is_the_same_bytes_in_whatever_order_variants_come() -> None:
    rows = rows_by_hand()
    once = json.dumps(summarise(rows, 5, 300))
    assert json.dumps(summarise(dict(reversed(rows.items())), 5, 300)) == once
    assert json.dumps(summarise(rows, 6, 300)) != once


def test_an_interval_does_not_depend_on_the_other_variants() -> None:
    rows = rows_by_hand()
    alone = summarise({"after": rows["after"]}, 0, 300)
    assert alone["after"] == summarise(rows, 0, 300)["after"]


def test_variants_on_other_questions_are_refused() -> None:
    rows = rows_by_hand()
    rows["before"] = rows["before"][::-1]
    with pytest.raises(DataError, match="got other questions in 'before'"):
        summarise(rows)
    with pytest.raises(DataError, match="no evaluated question"):
        summarise({"after": []})


# table

GOLDEN = """\
4 questions

variant            F1    95% interval     EM  support recall  searches  LLM calls  tokens
vanilla         0.000  [0.000, 0.000]  0.000           0.500      2.00       4.00      40
before          0.250  [0.000, 0.750]  0.250           0.500      2.00       4.00      40
sft_more        0.500  [0.000, 1.000]  0.500           0.500      2.00       4.00      40
after           0.750  [0.250, 1.000]  0.750           0.500      2.00       4.00      40
without_filter  0.500  [0.000, 1.000]  0.500           0.500      2.00       4.00      40
ceiling         1.000  [1.000, 1.000]  1.000           0.500      2.00       4.00      40
oracle          1.000  [1.000, 1.000]  1.000           0.500      2.00       4.00      40

paired over questions       F1      95% interval      p      EM  support recall
after - before          +0.500  [+0.000, +1.000]  0.477  +0.500          +0.000
after - sft_more        +0.250  [+0.000, +0.750]  1.000  +0.250          +0.000
after - without_filter  +0.250  [+0.000, +0.750]  1.000  +0.250          +0.000

joint training closes 67% of the way from before to ceiling"""


def test_the_table_lines_up_variants_and_differences() -> None:
    assert table(summarise(rows_by_hand(), seed=0, resamples=2000)) == GOLDEN


def test_the_held_out_bank_is_a_second_table_not_a_variant() -> None:
    rows = rows_by_hand()
    bank = summarise({name: rows[name] for name in ("before", "after")}, resamples=10)
    summary = {**summarise(rows, resamples=10), "held_out_bank": bank}
    assert "held_out_bank" not in variants(summary)
    _, second = table(summary).split("\n\nthe same in held-out wordings:\n")
    assert second == table(bank)
    assert "after - before" in second


def test_the_gap_closed_is_unknown_without_a_gap() -> None:
    summary = summarise(rows_by_hand(), resamples=10)
    assert gap_closed(summary) == pytest.approx(2 / 3)  # (0.75 - 0.25) / (1 - 0.25)
    assert gap_closed({**summary, "ceiling": summary["before"]}) is None
    assert gap_closed({"before": summary["before"]}) is None


# variants


def test_variants_give_each_block_its_modes_by_what_agents_write() -> None:
    modes = variant_modes([*ROLES, Role("summariser", "summary")])  # type: ignore[list-item]
    names = ("rewriter", "retriever", "filter", "answerer", "summariser")

    def spelt(*words: str) -> dict[str, str]:
        return dict(zip(names, words, strict=True))

    assert modes == {
        "vanilla": spelt("default", "default", "default", "warm", "default"),
        "trunk": spelt(*["trunk"] * 5),
        "before": spelt(*["warm"] * 5),
        "after": {},
        **{f"without_{name}": {name: "default"} for name in names},
        "ceiling": spelt("oracle", "oracle", "oracle", "warm", "warm"),
        "oracle": spelt(*["oracle"] * 5),
    }


def test_an_agent_the_config_holds_keeps_its_mode_in_warm_and_trained_variants() -> None:
    modes = variant_modes(ROLES, {"filter": "default", "rewriter": "frozen", "answerer": "learn"})
    assert modes["before"] == {"rewriter": "warm", "retriever": "warm", "filter": "default", "answerer": "warm"}
    assert modes["after"] == {"filter": "default"}
    assert modes["without_rewriter"] == {"filter": "default", "rewriter": "default"}


@pytest.mark.parametrize(("learnt", "expected"), [("Ann", 1.0), ("Bob", 0.5)])
def test_the_ceiling_takes_the_better_answerer_in_the_warm_starts_form(learnt: str, expected: float) -> None:
    question = Question("q", "?", ("Ann",))
    answers = {"warm": "Ann x y", "learn": learnt}  # F1 of the warm answerer: P = 1/3, R = 1, so 1/2
    pipeline: Any = Scripted(answers)
    rows = run_variants(pipeline, [question], "title", only=["ceiling"])
    assert list(rows) == ["ceiling"]
    assert rows["ceiling"][0]["f1"] == expected
    assert pipeline.forms == ["title", "title"]


def test_running_all_variants_gives_every_block_but_sft_more_and_shows_the_episodes() -> None:
    pipeline: Any = Scripted(dict.fromkeys(("warm", "learn", "trunk", "default", "oracle"), "Ann"))
    seen = dict[str, int]()
    rows = run_variants(pipeline, [QUESTION], "title", watch=lambda name, episodes: seen.update({name: len(episodes)}))
    blocks = ["vanilla", "trunk", "before", "after", *(f"without_{a.name}" for a in ROLES), "ceiling", "oracle"]
    assert list(rows) == list(seen) == blocks
    assert pipeline.forms[-1] == "sub_question"  # the oracle's


# the public function


def test_evaluate_reads_a_file_and_prints_its_metrics(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"id": "q", "question": "?", "answers": ["Ann"], "supporting_ids": ["a"], "hops": 2}\n')
    pipeline: Any = Scripted({"learn": "Ann"})
    report = evaluate(pipeline, str(path), modes={"filter": "default"}, resamples=50, seed=1)
    assert isinstance(report, Report)
    assert report.rows[0]["id"] == "q"
    assert report.summary["f1"] == {"mean": 1.0, "interval": [1.0, 1.0]}
    assert (report.summary["n"], report.summary["seed"]) == (1, 1)
    lines = str(report).splitlines()
    assert lines[0] == "1 question"
    assert any(line.split() == ["f1", "1.000", "[1.000,", "1.000]"] for line in lines)
    assert any(line.startswith("f1, hops 2 (n=1)") for line in lines)


def test_evaluate_refuses_gold_outside_the_index_and_an_empty_list(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text('{"id": "q", "question": "?", "answers": ["Ann"], "supporting_ids": ["zz"]}\n')
    pipeline: Any = Scripted({"learn": "Ann"})
    with pytest.raises(DataError, match="zz"):
        evaluate(pipeline, path)
    with pytest.raises(DataError, match="at least one"):
        evaluate(pipeline, [])


# files


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    write_json_atomic(path, {"a": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"a": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}
    assert [p.name for p in tmp_path.iterdir()] == ["eval.json"]
    with pytest.raises(StorageError, match="expected a folder with room"):
        write_json_atomic(tmp_path / "none" / "eval.json", {})


def test_rows_are_one_a_line_in_the_order_of_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "eval.rows.jsonl"
    write_rows(path, rows_by_hand())
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 7 * 4
    assert [r["variant"] for r in rows[::4]] == [
        *("vanilla", "before", "sft_more", "after", "without_filter", "ceiling", "oracle")
    ]


def test_importing_evaluation_and_report_loads_neither_torch_nor_marl() -> None:
    code = (
        "import sys, jointrag.eval.evaluation, jointrag.eval.report; "
        "print([m for m in sys.modules if m == 'torch' or m.startswith('jointrag.marl')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The report: every section from a run folder's files, whatever is missing, and nothing of the data as markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jointrag.data.errors import CheckpointError
from jointrag.data.types import Passage, Question
from jointrag.eval.evaluation import rows_of, summarise, write_json_atomic
from jointrag.eval.report import (
    Series,
    episode_pair,
    episode_record,
    line_chart,
    parse_mermaid,
    ticks_of,
    write_episodes,
    write_report,
)
from jointrag.graph.episode import Decision, Episode

AGENTS = ("rewriter", "retriever", "filter", "answerer")
MERMAID = """\
---
config:
  flowchart:
    curve: linear
---
graph TD;
\t__start__([<p>__start__</p>]):::first
\trewriter(rewriter)
\tretriever(retriever)
\tfilter(filter)
\tanswerer(answerer)
\t__end__([<p>__end__</p>]):::last
\t__start__ --> rewriter;
\tfilter --> rewriter;
\tretriever --> filter;
\trewriter -. &nbsp;False&nbsp; .-> answerer;
\trewriter -. &nbsp;True&nbsp; .-> retriever;
\tanswerer --> __end__;
\tclassDef default fill:#f2f0ff,line-height:1.2
"""
QUESTION = Question(
    "q0", "Where was <script>alert(1)</script> Ann Lee born?", ("Paris",), ("a",), hops=2, kind="bridge"
)
A, B = Passage("a", "Ann Lee", ""), Passage("b", "Bo & <b>Lee</b>", "")


def decide(agent: str, **fields: Any) -> Decision:
    return Decision(agent, agent, 0, fields.pop("hop", 0), 0, "learn", fields.pop("value", None), **fields)


def episode(answer: str, question: Question = QUESTION) -> Episode:
    return Episode(
        question,
        0,
        [
            decide("rewriter", update={"queries": ["one", "two"], "pending": ["one", "two"]}),
            decide("retriever", update={"passages": [B, A], "hop": 1}, searches=2),
            decide("filter", update={"evidence": []}, malformed=True),
            decide("rewriter", hop=1, update={"queries": [], "pending": []}),
            decide("summariser", hop=1, value="a sum", update={"summary": "a sum"}),
            decide("answerer", hop=1, update={"answer": answer}),
        ],
        {"answer": answer, "evidence": []},
    )


def metrics(updates: int = 10) -> list[dict[str, Any]]:
    out = []
    for i in range(updates):
        agent = {
            "length": 4.0, "decisions": 128,
            "process": {"gain": 0.1 * i, "format": -0.05}, "malformed": 0.01, "kl_to_warm": 0.01 * i,
            "entropy": 1.5, "clipped": 0.1, "gradient": 0.7, "explained_variance": 0.05 * i, "beta": 0.05,
        }  # fmt: skip
        line: dict[str, Any] = {
            "update": i + 1, "episodes": 128 * (i + 1), "train_f1": 0.3 + 0.03 * i, "team_reward": 0.2 + 0.03 * i,
            "agents": dict.fromkeys(AGENTS, agent), "critic": {"loss": 0.5, "explained_variance": 0.05 * i},
            "searches": 1.5,
        }  # fmt: skip
        if i in (0, 4, 9):
            line["dev_f1"] = {0: 0.31, 4: 0.62, 9: 0.58}[i]
        out.append(line)
    return out


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run: every file that the report reads."""
    (tmp_path / "config.yaml").write_text("seed: 7\nllm: {model: tiny}\nmarl: {algorithm: mappo}\n")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics()))
    (tmp_path / "graph.mermaid").write_text(MERMAID)
    questions = [Question(f"q{i}", "?", ("Paris",), ("a",), hops=1 + i % 2, kind="bridge") for i in range(20)]
    right = {"vanilla": 2, "before": 6, "sft_more": 8, "after": 15, "without_filter": 9, "ceiling": 18, "oracle": 20}
    rows = {
        name: rows_of(name, [episode("Paris" if i < count else "Rome", q) for i, q in enumerate(questions)])
        for name, count in right.items()
    }
    write_json_atomic(tmp_path / "eval.json", summarise(rows, resamples=200))
    write_episodes(tmp_path, [episode("Rome")] * 30, [episode("Paris")] * 30)
    return tmp_path


class Page(HTMLParser):
    """Collects tags, and notes every tag that is closed out of order."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.wrong = list[str](), list[str](), list[str]()
        self.addresses = list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [str(v) for k, v in attrs if k in ("href", "src", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def parsed(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert (page.wrong, page.open) == ([], [])
    assert "script" not in page.tags
    assert all(address.startswith("#") for address in page.addresses)  # nothing is loaded from anywhere
    assert not re.search(r"url\((?!#)|@import|NaN|\binf\b|None", text)
    return text, page


def test_a_finished_run_has_every_section(run_folder: Path) -> None:
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    text, page = parsed(path)
    for key in ("time", "agents", "table", "differences", "hops", "graph", "episodes", "config"):
        assert f'<h2 id="{key}">' in text
    assert "Joint training raises F1 on 20 held-out questions: 0.300 before, 0.750 after." in text
    assert "best 0.620" in text and "Best dev F1 0.620 at 640 episodes" in text
    for agent in AGENTS:
        assert f"<h3>{agent}</h3>" in text
    assert "+0.450" in text  # after - before
    assert "after − without_filter" in text
    assert page.tags.count("details") == 20
    assert "seed 7" in text and "10 updates" in text and "1,280 episodes" in text
    assert text.count('class="edge') == 6 and "classDef" not in text  # drawn, not shown as text


def test_held_out_wordings_stand_under_the_table(run_folder: Path) -> None:
    summary = json.loads((run_folder / "eval.json").read_text())
    summary["held_out_bank"] = {k: summary[k] for k in ("n", "seed", "before", "after", "after_minus_before")}
    (run_folder / "eval.json").write_text(json.dumps(summary))
    text, _ = parsed(write_report(run_folder))
    assert text.index('id="table"') < text.index("The same in held-out wordings") < text.index('id="differences"')
    assert text.count("<th>after − before</th>") == 2


def test_the_warm_start_is_the_first_point_on_dev_and_may_stay_the_best(run_folder: Path) -> None:
    (run_folder / "training.json").write_text('{"dev_f1": {"0": 0.7, "5": 0.62}, "best": 0}')
    assert "Best dev F1 0.700 at 0 episodes" in parsed(write_report(run_folder))[0]


def test_the_report_is_the_same_bytes_again(run_folder: Path) -> None:
    assert write_report(run_folder).read_bytes() == write_report(run_folder).read_bytes()


def test_markup_in_data_stays_text(run_folder: Path) -> None:
    text, page = parsed(write_report(run_folder))
    assert "Where was &lt;script&gt;alert(1)&lt;/script&gt; Ann Lee born?" in text
    assert "Bo &amp; &lt;b&gt;Lee&lt;/b&gt;" in text
    (run_folder / "config.yaml").write_text("out: '</pre><img src=x onerror=alert(1)>'\n")
    text, page = parsed(write_report(run_folder))
    assert "img" not in page.tags


FILES = ("config.yaml", "metrics.jsonl", "eval.json", "episodes.jsonl", "graph.mermaid")


@pytest.mark.parametrize("missing", FILES)
def test_a_missing_file_costs_its_section_only(run_folder: Path, missing: str) -> None:
    (run_folder / missing).unlink()
    text, _ = parsed(write_report(run_folder))
    assert text.count("<h2") == 8


def test_an_empty_folder_says_what_is_not_there_yet(tmp_path: Path) -> None:
    text, _ = parsed(write_report(tmp_path))
    assert "This run has not been evaluated yet." in text
    assert "No training yet" in text and "No evaluation yet" in text and "No example episodes yet" in text


def test_broken_and_older_files_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"update": 1, "train_f1": 0.5, "agents": {"rewriter": {"process": {"gain": NaN}}}}\n'
        '{"train_f1": null, "agents": 3}\n[1]\n{"update": 2, "train'
    )
    (tmp_path / "eval.json").write_text('{"n": 3, "after": {"f1": {"mean": 0.5}}, "after_minus_before": {}, "odd": 1}')
    (tmp_path / "episodes.jsonl").write_text('{"question": "?", "after": {"steps": [{"node": "x"}, 3]}}\n')
    (tmp_path / "config.yaml").write_text("a: [1")
    (tmp_path / "graph.mermaid").write_text("graph TD;\n\tsomething else entirely\n")
    text, _ = parsed(write_report(tmp_path))
    assert "0.500" in text
    assert "something else entirely" in text  # shown as text
    (tmp_path / "eval.json").write_text("{")
    assert "No evaluation yet" in parsed(write_report(tmp_path))[0]


def test_an_interval_across_zero_is_called_no_clear_change(run_folder: Path) -> None:
    summary = json.loads((run_folder / "eval.json").read_text())
    summary["after_minus_before"]["f1"]["interval"] = [-0.1, 0.2]
    (run_folder / "eval.json").write_text(json.dumps(summary))
    assert "does not clearly change F1" in parsed(write_report(run_folder))[0]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        write_report(tmp_path / "none")


# example episodes


def test_an_episode_tells_each_decision_in_words() -> None:
    record = episode_record(episode("Paris, France"))
    assert record["f1"] == pytest.approx(2 / 3)  # P = 1/2, R = 1
    assert [(s["node"], s["hop"], s["action"], s["malformed"]) for s in record["steps"]] == [
        ("rewriter", 0, "one | two", False),
        ("retriever", 0, "Bo & <b>Lee</b>; Ann Lee", False),
        ("filter", 0, "none", True),
        ("rewriter", 1, "stop", False),
        ("summariser", 1, "a sum", False),
        ("answerer", 1, "Paris, France", False),
    ]
    assert record["steps"][1]["passages"] == [["Bo & <b>Lee</b>", False], ["Ann Lee", True]]


def test_a_pair_is_of_one_question() -> None:
    pair = episode_pair(episode("Rome"), episode("Paris"))
    assert list(pair) == ["question", "answers", "supporting_ids", "before", "after"]
    assert (pair["before"]["f1"], pair["after"]["f1"]) == (0.0, 1.0)
    with pytest.raises(ValueError, match="pair the same questions"):
        episode_pair(episode("Rome"), episode("Paris", Question("other", "?", ("Paris",))))


# charts and graph


@pytest.mark.parametrize(
    ("lo", "hi", "count", "expected"),
    [
        (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.12, 0.33, 3, [0.1, 0.2, 0.3, 0.4]),
        (-3.0, 14.0, 3, [-10.0, 0.0, 10.0, 20.0]),
        (128, 3840, 6, [0, 1000, 2000, 3000, 4000]),
        (0.5, 0.5, 3, [0.44, 0.46, 0.48, 0.5, 0.52, 0.54, 0.56]),  # no spread: a tenth to each side
    ],
)
def test_ticks_are_round_and_cover_the_range(lo: float, hi: float, count: int, expected: list[float]) -> None:
    assert ticks_of(lo, hi, count)[0] <= lo and ticks_of(lo, hi, count)[-1] >= hi
    if lo < hi:
        assert ticks_of(lo, hi, count) == pytest.approx(expected)


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(0.0, 0.0), (1.0, 0.0)], [(5.0, -2.0), (6.0, 1e9)]])
def test_a_line_chart_takes_one_point_and_a_flat_line(points: list[tuple[float, float]]) -> None:
    assert "nan" not in line_chart("t", [Series("a", "after", points)], 300, 120)


def test_a_chart_without_points_is_nothing() -> None:
    assert line_chart("t", [Series("a", "after")], 300, 120) == ""


def test_langgraphs_mermaid_is_read_with_labels_loops_and_subgraphs() -> None:
    drawn = parse_mermaid(MERMAID)
    assert drawn is not None
    assert list(drawn.nodes.values()) == ["__start__", *AGENTS, "__end__"]
    assert ("rewriter", "answerer", "False", True) in drawn.edges
    assert ("filter", "rewriter", "", False) in drawn.edges
    nested = parse_mermaid("graph TD;\na(a)\na --> s\\3ab;\nsubgraph s\ns\\3ab(b)\nend\n")
    assert nested is not None
    assert nested.nodes == {"a": "a", "s\\3ab": "s / b"}


@pytest.mark.parametrize("text", ["", "graph TD;\n", "graph TD;\na ==> b\n", "graph TD;\na --> b;\n", "nonsense"])
def test_mermaid_that_is_not_understood_is_not_drawn(text: str) -> None:
    assert parse_mermaid(text) is None


# what the lab measured


def figure(mean: float, **more: Any) -> dict[str, Any]:
    return {"mean": mean, "interval": [mean - 0.1, mean + 0.1], **more}


def test_ablation_and_credit_are_sections_once_they_were_measured(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text()
    assert "Ablation" not in page and "Credit of each node" not in page
    arms = [{"arm": "full", "f1": figure(0.8), "searches": 2.0, "tokens": 100.0}]
    worse = figure(-0.2, p=0.0001, p_holm=0.0003)
    arms.append({"arm": "drop <filter>", "f1": figure(0.6), "minus_full": worse, "searches": 1.0, "tokens": 90.0})
    write_json_atomic(tmp_path / "ablate.json", {"n": 600, "seeds": 5, "rows": arms})
    example = {"question": QUESTION.question, "answers": ["Paris"], "gain": -1.0}
    example |= {"with": episode_record(episode("Rome")), "without": episode_record(episode("Paris"))}
    node = {"agent": "filter", "credit": figure(0.5), "help": figure(0.6), "harm": figure(0.1), "hurt_most": [example]}
    node |= {"tokens": 80.0, "searches": 0.0, "helped_most": []}
    write_json_atomic(tmp_path / "credit.json", {"n": 300, "rule": "shapley", "rows": [node]})
    page = write_report(tmp_path).read_text()
    for told in ("drop &lt;filter&gt;", "−0.200", "&lt; 0.001", "600 questions, 5 seeds", "Full pipeline: F1 0.8"):
        assert told in page, told
    for told in ("credit by shapley", "filter hurt most", "60.0%", "−1", "&lt;script&gt;"):
        assert told in page, told
    assert "<script>" not in page and "filter helped most" not in page


def test_warnings_of_a_training_stand_with_the_agents(tmp_path: Path) -> None:
    line = {"update": 7, "agents": {"filter": {"kl_to_warm": 9.0}}, "warnings": ["filter: KL is 9.00; likely <lr>"]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    assert "update 7: filter: KL is 9.00; likely &lt;lr&gt;" in write_report(tmp_path).read_text()

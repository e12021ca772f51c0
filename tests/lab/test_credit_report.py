"""The credit report returns what each agent provably contributed, on episodes told by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jointrag.data.errors import CheckpointError
from jointrag.graph.episode import Episode
from jointrag.lab.credit_report import rows_of, table, training
from jointrag.lab.stories import BRIDGE, PARTLY, WRONG, Cast, answer, gather, tell
from jointrag.rewards.build import build_rewards

CAST = Cast("rewriter", "retriever", "filter", "answerer", max_hops=2)
AGENTS = ("rewriter", "retriever", "filter", "answerer")
RIGHT = BRIDGE.answers[0]
REWARDS = build_rewards({"team": [{"type": "f1"}], "process": {}})


def told(*texts: str) -> list[Episode]:
    return [tell(BRIDGE, [*gather(CAST), answer(t)], CAST) for t in texts]


def run(absent: frozenset[str]) -> list[Episode]:
    """Two questions, both answered right. The rewriter changes nothing, the filter half, the answerer all."""
    if "answerer" in absent:
        return told(WRONG, WRONG)
    if "filter" in absent:
        return told(PARTLY, PARTLY)  # F1 .5
    return told(RIGHT, RIGHT)


def by_agent(rule: str, run: Any = run) -> dict[str, dict[str, Any]]:
    return {row["agent"]: row for row in rows_of(AGENTS, run, REWARDS, 0, rule, resamples=200)}


def test_difference_credit_is_0_half_or_all_of_the_reward() -> None:
    rows = by_agent("difference")
    assert [rows[a]["credit"]["mean"] for a in AGENTS] == [0.0, 0.0, 0.5, 1.0]
    assert [rows[a]["help"]["mean"] for a in AGENTS] == [0.0, 0.0, 1.0, 1.0]
    assert all(rows[a]["harm"]["mean"] == 0.0 for a in AGENTS)


def test_shapley_credit_is_shared_among_those_that_need_each_other_and_sums_to_the_total() -> None:
    rows = by_agent("shapley")
    assert [rows[a]["credit"]["mean"] for a in AGENTS] == pytest.approx([0.0, 0.0, 0.25, 0.75])


def test_harm_counts_the_questions_an_agent_made_worse_and_shows_them() -> None:
    def harmful(absent: frozenset[str]) -> list[Episode]:
        return told(RIGHT, RIGHT) if "filter" in absent else told(RIGHT, WRONG)

    row = by_agent("difference", harmful)["filter"]
    assert (row["credit"]["mean"], row["harm"]["mean"], row["help"]["mean"]) == (-0.5, 0.5, 0.0)
    (hurt,) = row["hurt_most"]
    assert (hurt["gain"], hurt["with"]["answer"], hurt["without"]["answer"]) == (-1.0, WRONG, RIGHT)
    assert row["helped_most"] == []


def test_cost_is_that_of_the_nodes_own_decisions() -> None:
    rows = by_agent("difference")
    episode = run(frozenset())[0]
    for a in AGENTS:
        assert rows[a]["llm_calls"] == len(episode.of(a))
        assert rows[a]["searches"] == sum(d.searches for d in episode.of(a))
    assert sum(rows[a]["tokens"] for a in AGENTS) == episode.tokens


def test_shares_of_the_advantage_come_from_the_last_updates(tmp_path: Path) -> None:
    def line(a: float, b: float) -> str:
        agents = {"a": {"decisions": 10, "advantage_size": a, "explained_variance": 0.5}}
        agents["b"] = {"decisions": 20, "advantage_size": b, "explained_variance": 0.1}
        return json.dumps({"agents": agents})

    (tmp_path / "metrics.jsonl").write_text("\n".join([line(9.0, 0.0), *[line(0.2, 0.3)] * 5, '{"agents": {}}']))
    found = training(tmp_path)
    assert found["a"] == pytest.approx({"explained_variance": 0.5, "advantage_share": 2 / 8})
    assert found["b"]["advantage_share"] == pytest.approx(6 / 8)
    with pytest.raises(CheckpointError, match="expected the log of a training"):
        training(tmp_path / "nowhere")


def test_the_table_has_a_line_an_agent() -> None:
    rows = list(by_agent("difference").values())
    text = table(
        {
            "n": 2,
            "rule": "difference",
            "rows": [rows[0], rows[3] | {"explained_variance": 0.5, "advantage_share": 0.25}],
        }
    )
    assert "2 questions, credit by difference" in text
    assert text.splitlines()[-1].split()[:2] == ["answerer", "+1.000"] and text.endswith("0.50        25%")

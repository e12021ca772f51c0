"""The price of searches, worked by hand, and what it does to a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jointrag.configs.schema import BudgetConfig
from jointrag.data.types import Question
from jointrag.graph.episode import Decision, Episode
from jointrag.marl.budget import MOST, SearchBudget


def searching(*counts: int) -> list[Episode]:
    out = []
    for n in counts:
        e = Episode(Question("q", "?", ("x",)), 0, team={"f1": 1.0})
        e.decisions = [Decision("retriever", "retriever", 0, 0, 0, "learn", (), searches=n)]
        e.process = [{}]
        out.append(e)
    return out


def budget(searches: float, rate: float = 0.1, ramp: int = 1) -> SearchBudget:
    return SearchBudget(BudgetConfig(searches=searches, rate=rate, ramp=ramp))


def test_the_price_rises_by_what_is_too_much_and_falls_by_what_is_saved() -> None:
    b = budget(1.0)
    assert b.observe(searching(2, 4)) == {"searches": 3.0, "limit": 1.0, "price": 0.0}
    assert b.price == pytest.approx(0.6)  # held: 0 + .1 (3 - 1) = .2; price: .2 + 2 * .1 (3 - 1)
    b.observe(searching(0, 1))
    assert b.price == pytest.approx(0.05)  # held: .2 + .1 (.5 - 1) = .15; price: .15 + 2 * .1 (.5 - 1)
    b.observe(searching(1))
    assert b.price == pytest.approx(0.15)  # at the limit what is held is the price


def test_the_price_is_never_negative_and_never_above_its_cap() -> None:
    b = budget(2.0)
    b.observe(searching(1))
    assert b.price == 0.0
    b = budget(1.0, rate=9.0)
    b.observe(searching(4))
    assert b.price == MOST


def test_who_planned_a_search_pays_for_it_and_not_the_team() -> None:
    b = budget(1.5)
    b.price = 0.1
    (e,) = searching(3)
    asked = {"pending": ("a", "b", "c")}
    completion: Any = object()
    e.decisions.insert(0, Decision("rewriter", "rewriter", 0, 0, 0, "learn", "", update=asked, completion=completion))
    e.decisions.append(
        Decision("rewriter", "rewriter", 1, 0, 0, "learn", "", update={"pending": ()}, completion=completion)
    )
    e.process = [{}, {}, {}]
    b.charge([e])
    assert [p.get("search_price") for p in e.process] == [pytest.approx(-0.2), None, 0.0]
    assert e.team["search_price"] == 0.0
    e.decisions[0].mode = "warm"  # it cannot learn to ask less: all pay
    b.charge([e])
    assert e.team["search_price"] == pytest.approx(-0.2)


def test_a_search_nobody_planned_costs_the_team_the_price() -> None:
    b = budget(1.0)
    b.price = 0.1
    episodes = searching(0, 1, 3)
    b.charge(episodes)
    assert [e.team["search_price"] for e in episodes] == pytest.approx([0.0, 0.0, -0.2])  # one of them is free


def test_the_limit_comes_down_from_what_the_policy_does_at_first() -> None:
    b = budget(1.0, ramp=4)
    limits = [b.observe(searching(3))["limit"] for _ in range(5)]
    assert limits == pytest.approx([2.5, 2.0, 1.5, 1.0, 1.0])
    frugal = budget(2.0, ramp=4)
    assert frugal.observe(searching(1))["limit"] == 2.0  # nothing to come down from


def rounds(*spared: bool | None) -> Episode:
    """One search, then a round a plan: it searches once more unless it was spared, which ends the episode."""
    (e,) = searching(1)
    for n, made in enumerate(spared):
        e.decisions.append(Decision("rewriter", "rewriter", 2 * n + 1, n + 1, 0, "learn", (), spared=made))
        if not made:
            e.decisions.append(Decision("retriever", "retriever", 2 * n + 2, n + 1, 0, "learn", (), searches=1))
    return e


def test_searches_that_were_not_spared_count_for_those_that_were() -> None:
    b = budget(1.0)
    # two plans, a half spared: of 4 episodes 2 end at once, 1 after the first round, 1 goes on to the end
    episodes = [rounds(True), rounds(True), rounds(False, True), rounds(False, False)]
    # 1 each; the 2 second searches count 1 / (1/2) each, the third 1 / (1/4): as if all 4 had gone on to the end
    assert b.observe(episodes)["searches"] == pytest.approx((4 + 2 * 2 + 4) / 4) == 3.0
    assert b.observe([rounds(True), rounds(True)])["searches"] == 1.0


def test_plans_that_could_not_be_spared_count_as_they_are() -> None:
    assert budget(1.0).observe([rounds(None, None), rounds(None)])["searches"] == 2.5


def test_nothing_is_spared_where_the_budget_is_kept() -> None:
    b = budget(2.0)
    assert b.spare[0] == 0.0
    b.begin(searching(3))
    assert b.spare == (0.5, 2) and b.start == 3.0
    b.observe(searching(2))
    assert b.spare[0] == 0.0


def test_a_share_of_the_plans_past_the_budget_is_made_to_ask_nothing(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    t = trainer(tmp_path / "run", "marl.episodes_per_update=32")
    episodes = t._rollout(1, 5, (0.5, 1))
    plans = [d for e in episodes for d in e.of("rewriter") if not d.forced]
    late = [d for d in plans if d.spared is not None]
    assert all(d.spared is None for d in plans if d.hop == 0) and all(d.hop >= 1 for d in late)
    assert 0.3 < sum(d.spared for d in late) / len(late) < 0.7
    for d in late:
        if d.spared:
            assert d.value == () and d.trains and d.completion is not None and d.request is not None
    assert len(late) > len([d for d in late if d.spared]) > 0
    twice = [d for e in t._rollout(1, 5, (0.5, 2)) for d in e.of("rewriter") if d.spared is not None]
    assert len(twice) < len(late)  # two queries are free
    greedy = t.pipeline.run(t.dev, spare=(0.5, 0))
    assert not any(d.spared for e in greedy for d in e.decisions)


@pytest.mark.parametrize(
    ("means", "themselves", "kept", "f1"),
    [
        ((0.6, 1.02), (0.9, 0.9), "means", 0.6),  # within 2% of the budget: the others are not asked
        ((0.6, 1.8), (0.4, 1.0), "themselves", 0.4),
        ((0.6, 1.8), (0.4, 1.9), "means", 0.6),  # neither keeps it: the one with fewer searches
    ],
)
def test_heads_are_measured_beside_their_means_where_those_exceed_the_budget(
    trainer: Callable[..., Any], tmp_path: Path, means: Any, themselves: Any, kept: str, f1: float
) -> None:
    t = trainer(tmp_path / "run", "marl.budget={searches: 1.0}")
    heads, looks = t.pipeline.llm.heads, [means, themselves]
    t._dev = lambda: looks.pop(0)
    own = heads.state("filter")
    mean = {k: v + 1.0 for k, v in own.items()}
    progress: dict[str, Any] = {"best": 0, "best_dev": (0.5, 2.0), "average": {"filter": mean}}
    assert t._choose(3, progress) == f1 and progress["best"] == 3
    best = progress["best_heads"]["filter"]
    assert all(bool((best[k] == (mean if kept == "means" else own)[k]).all()) for k in own)
    assert all(bool((heads.state("filter")[k] == own[k]).all()) for k in own)  # training goes on with them


def test_a_stored_price_goes_on_where_it_was() -> None:
    b, again = budget(1.0, ramp=4), budget(1.0, ramp=4)
    for n in (3, 2):
        b.observe(searching(n))
    again.set_state(b.state())
    assert again == b and again.observe(searching(2)) == b.observe(searching(2)) and again == b


def test_a_training_logs_and_charges_the_price(trainer: Callable[..., Any], log: Any, tmp_path: Path) -> None:
    result = trainer(tmp_path / "run", "marl.budget={searches: 0.1, rate: 0.2, ramp: 1}", log=log).train()
    one, two = result.metrics
    assert two["agents"]["rewriter"]["process"]["search_price"] < 0.0
    assert one["budget"]["price"] == 0.0 and one["budget"]["limit"] == pytest.approx(0.1)
    assert two["budget"]["price"] == pytest.approx(3 * 0.2 * (one["budget"]["searches"] - 0.1))

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


def test_who_was_not_made_to_ask_nothing_counts_for_those_who_were() -> None:
    b, episodes = budget(1.0), searching(3, 1, 2)
    plan = {"update": {"pending": ("a",)}, "completion": object()}
    episodes[0].decisions.insert(0, Decision("rewriter", "rewriter", 0, 1, 0, "learn", "", **plan))  # type: ignore[arg-type]
    episodes[1].decisions[0].spared = True
    assert b.observe(episodes)["searches"] == 2.5  # nothing was to be spared: the excess is not known yet
    assert b.excess == 1.5 and b.spare == (0.5, 1)
    assert b.observe(episodes)["searches"] == pytest.approx((2 * 3 + 2) / 3)  # the first is one of 1 / (1 - 1/2)


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
    late = [d for d in plans if d.hop >= 1]
    assert not any(d.spared for d in plans if d.hop < 1)
    assert 0.3 < sum(d.spared for d in late) / len(late) < 0.7
    for d in late:
        if d.spared:
            assert d.value == () and d.trains and d.completion is not None and d.request is not None
    greedy = t.pipeline.run(t.dev, spare=(0.5, 0))
    assert not any(d.spared for e in greedy for d in e.decisions)


def test_a_stored_price_goes_on_where_it_was() -> None:
    b, again = budget(1.0, ramp=4), budget(1.0, ramp=4)
    for n in (3, 2):
        b.observe(searching(n))
    again.set_state(b.state())
    assert again == b and again.observe(searching(2)) == b.observe(searching(2)) and again == b


def test_a_training_logs_and_charges_the_price(trainer: Callable[..., Any], log: Any, tmp_path: Path) -> None:
    result = trainer(tmp_path / "run", "marl.budget={searches: 0.1, rate: 0.2, ramp: 1}", log=log).train()
    one, two = result.metrics
    assert one["budget"]["price"] == 0.0 and one["budget"]["limit"] == pytest.approx(0.1)
    assert two["budget"]["price"] == pytest.approx(3 * 0.2 * (one["budget"]["searches"] - 0.1))

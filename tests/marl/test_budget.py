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
    b = budget(1.0)
    b.price = 0.1
    (e,) = searching(2)
    asked = {"pending": ("a", "b")}
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
    episodes = searching(0, 3)
    b.charge(episodes)
    assert [e.team["search_price"] for e in episodes] == pytest.approx([0.0, -0.3])


def test_the_limit_comes_down_from_what_the_policy_does_at_first() -> None:
    b = budget(1.0, ramp=4)
    limits = [b.observe(searching(3))["limit"] for _ in range(5)]
    assert limits == pytest.approx([2.5, 2.0, 1.5, 1.0, 1.0])
    frugal = budget(2.0, ramp=4)
    assert frugal.observe(searching(1))["limit"] == 2.0  # nothing to come down from


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

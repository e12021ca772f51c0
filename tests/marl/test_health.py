"""Each symptom is found where it shows and nowhere else; a run that diverges goes back and goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jointrag.configs.schema import AgentConfig
from jointrag.data.errors import DivergedError
from jointrag.data.types import Passage, Question
from jointrag.graph.episode import Decision, Episode
from jointrag.marl.health import behaviour, silence, symptoms
from jointrag.marl.learner import Learner

SOUND = {
    "decisions": 64, "advantage_std": 0.5, "kl_to_warm": 0.5, "kl": 0.5, "clipped": 0.1, "gradient": 2.0,
    "entropy": 0.4, "malformed": 0.0, "length": 4.0, "answered": 0.9, "queries": 0.7, "empty": 0.2,
}  # fmt: skip
WRONG = {
    "answered": (0.2, "answers 20% of the time, 90% at first", True),
    "queries": (0.1, "asks 0.10 queries a decision", True),
    "empty": (0.9, "keeps nothing 90% of the time, 20% at first", True),
    "advantage_std": (1e-5, "advantages are all alike", False),
    "entropy": (0.05, "entropy is 0.05, 0.4 at first", False),
    "kl_to_warm": (5.0, "KL to the warm start is 5.00, target 1", True),
    "clipped": (0.7, "70% of its tokens are clipped", False),
    "gradient": (1200.0, "gradient norm 1.2e+03", False),
    "malformed": (0.4, "40% of its output is malformed, 0% at first", True),
    "length": (9.0, "output is 9.0 tokens long, 4.0 at first", False),
}
SETTINGS = {"a": AgentConfig.model_validate({"kl": {"target": 1.0}})}


def read(now: dict[str, Any], best: float = 0.5, **record: Any) -> list[Any]:
    return symptoms({"agents": {"a": now}, **record}, {"a": SOUND}, SETTINGS, 1.0, best)


def decision(update: dict[str, Any], **more: Any) -> Decision:
    return Decision("a", "a", 0, 0, 0, "learn", None, update=update, **more)


def test_a_sound_update_has_no_symptom() -> None:
    assert read(SOUND, dev_f1=0.45) == []


@pytest.mark.parametrize("figure", WRONG)
def test_a_figure_gone_wrong_is_one_symptom_with_a_cause(figure: str) -> None:
    value, what, severe = WRONG[figure]
    (found,) = read({**SOUND, figure: value})
    assert (found.agent, found.severe) == ("a", severe)
    assert found.what.startswith(what) and found.cause
    assert str(found) == f"a: {found.what}; likely {found.cause}"


def test_fewer_queries_are_what_a_budget_asks_for_but_not_that_none_is_left() -> None:
    assert read({**SOUND, "queries": 0.1}, budget={"searches": 0.9, "limit": 1.0}) == []
    (found,) = read({**SOUND, "queries": 0.1}, budget={"searches": 0.1, "limit": 1.0})
    assert found.severe


def test_an_agent_that_decided_nothing_has_no_symptom() -> None:
    assert read({**SOUND, "decisions": 0, "malformed": 1.0}) == []


def test_a_fall_on_dev_points_at_the_agent_furthest_from_its_warm_start() -> None:
    agents = {"a": SOUND, "b": {**SOUND, "kl_to_warm": 0.9}}
    record = {"agents": agents, "dev_f1": 0.35}
    (found,) = symptoms(record, agents, {**SETTINGS, "b": SETTINGS["a"]}, 1.0, 0.5)
    assert (found.agent, found.severe, found.what) == ("b", True, "dev F1 fell to 0.350 from 0.500")


def test_behaviour_is_read_off_what_an_agent_wrote() -> None:
    p = Passage("p", "t", "x")
    calls = [decision({"answer": "Oslo"}), decision({"answer": "unknown"}), decision({"answer": ""})]
    assert behaviour(calls) == {"answered": pytest.approx(1 / 3)}
    assert behaviour([decision({"evidence": []}), decision({"evidence": [p]})]) == {"empty": 0.5}
    assert behaviour([decision({"evidence": []}, forced=True)]) == {}  # nothing else was legal
    asks = [decision({"queries": ["x", "y"], "pending": ["x", "y"]}), decision({"queries": [], "pending": []})]
    assert behaviour(asks) == {"queries": 1.0}
    assert behaviour([decision({"passages": [p], "hop": 1})]) == {}


def told(text: str, team: float, own: float, answers: tuple[str, ...] = ("Oslo",)) -> Episode:
    e = Episode(Question("q", "?", answers), 0, team={"f1": team})
    e.decisions, e.process = [decision({"answer": text})], [{"paid": own}]
    return e


def test_what_not_answering_earns_is_told_by_term() -> None:
    episodes = [told("Oslo", 1.0, 0.0), told("Rome", 0.0, 0.0), told("unknown", -0.1, 0.8), told("", -0.1, 0.6)]
    assert silence("a", episodes) == pytest.approx({"team.f1": -0.6, "a.paid": 0.7})
    assert silence("a", episodes[:2]) == {} and silence("b", episodes) == {}
    assert silence("a", [told("Oslo", 1.0, 0.0, ("unknown",)), told("unknown", 1.0, 0.0, ("unknown",))]) == {}


def test_a_term_that_pays_for_silence_is_named_before_the_answers_stop_and_when_they_do() -> None:
    paid = {"silence": {"team.f1": -0.6, "a.paid": 0.7}}
    (early,) = read({**SOUND, **paid})
    assert (early.what, early.severe) == ("earns 0.10 more by not answering than by answering", False)
    (late,) = read({**SOUND, **paid, "answered": 0.4})
    assert late.severe and late.cause.startswith("a.paid pays +0.70 more for not answering")
    (mild,) = read({**SOUND, "silence": {"team.f1": -0.6, "a.paid": 0.2}})
    assert not mild.severe and mild.cause.startswith("a.paid pays +0.20 more for not answering")
    for pays in ({"a.paid": 0.05}, {"a.format": 0.2}, {"team.cost": 0.3}):
        assert read({**SOUND, "silence": {"team.f1": -0.6, **pays}}) == []


# going back


def diverging(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The filter's loss is no number in update `at`, halfway through."""
    real = Learner.update

    def update(self: Learner, episodes: Any, seed: int, rate: float, number: int = 0) -> Any:
        log = real(self, episodes, seed, rate, number)
        if number == at:
            raise DivergedError("the loss of head 'filter' is nan", "filter")
        return log

    monkeypatch.setattr(Learner, "update", update)


def test_a_head_that_diverges_ends_the_run_unless_it_may_go_back(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging(monkeypatch, at=2)
    with pytest.raises(DivergedError, match="'filter' is nan"):
        trainer(tmp_path / "run").train()


def test_a_run_goes_back_to_its_best_heads_with_that_heads_rate_lowered(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging(monkeypatch, at=2)
    t = trainer(tmp_path / "run", "marl.rollback=1", "marl.updates=3", "eval.every=1")
    saved = []
    real = t._save

    def save(stage: str, update: int, learner: Any, progress: Any) -> None:
        heads = t.pipeline.llm.heads
        saved.append((heads.hash("filter"), heads.hash("rewriter"), learner.base_lr, progress["best"]))
        real(stage, update, learner, progress)

    monkeypatch.setattr(t, "_save", save)
    result = t.train()
    one, two, three = (json.loads(x) for x in (result.out / "metrics.jsonl").read_text().splitlines())
    assert two["diverged"] == "the loss of head 'filter' is nan" and two["agents"] == {}
    assert two["rolled_back"]["heads"] == ["filter"] and two["rolled_back"]["to"] in (0, 1)
    assert "rolled_back" not in one and "rolled_back" not in three and three["agents"]["filter"]["decisions"]
    lr = t.config.agent("filter").lr
    assert (
        saved[-1][2]["filter"][0] == pytest.approx(lr / 10)
        and saved[-1][2]["rewriter"][0] == t.config.agent("rewriter").lr
    )


def test_the_price_of_searches_moves_on_where_a_head_diverged(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverging(monkeypatch, at=1)
    budget = "marl.budget={searches: 0.1, rate: 0.2, ramp: 1}"
    one, two = trainer(tmp_path / "run", "marl.rollback=1", budget).train().metrics
    assert "diverged" in one and two["budget"]["price"] == pytest.approx(3 * 0.2 * (one["budget"]["searches"] - 0.1))


def test_what_was_lowered_stays_so_in_a_resumed_run(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmed: Callable[..., Any]
) -> None:
    _, learner = warmed()
    rate = learner.base_lr["filter"][0]
    learner.start_over(["filter"])
    _, again = warmed()
    again.set_state(learner.state())
    assert again.base_lr["filter"][0] == pytest.approx(rate / 10)

"""From `rewards: {...}` of a config to a RewardFunction: every key checked, then episodes scored by it.

    team            = per term: weight x value (and `format` where the final answer was malformed)
    process[d]      = per term of d's agent: weight x value, a positive one divided
                      - by the decisions of that agent in the same step (parallel branches are averaged: a sum would
                        pay for fanning out; a penalty is not, or fanning out would make searches cheap)
                      - by the hop cap, unless the term's sum over an episode is bounded as it is (`per_hop`)

A malformed decision took its agent's default action: it earns nothing positive, and pays `format` where its agent
learns. A decision whose query gives an answer away (`guards.leaks`) earns nothing positive either.
Forced decisions (one legal action) and those of a failed tool are not judged: {}.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jointrag.configs.schema import Config, GuardsConfig, RewardsConfig
from jointrag.data.errors import ConfigError, TrainingError, nearest
from jointrag.graph.episode import Episode
from jointrag.rewards.base import ProcessTerm, TeamTerm
from jointrag.rewards.guards import drop_positive, halve_positive, leaks
from jointrag.rewards.reading import malformed_answer
from jointrag.rewards.registry import PROCESS, TEAM

DEFAULT: dict[str, Any] = RewardsConfig().model_dump()

LARGEST = 1e6  # a reward beyond it is a mistake, and would drown every statistic

T = TypeVar("T", TeamTerm, ProcessTerm)


class Weight(BaseModel):
    """A weight: a number, or linear from `from` to `to` over the first `episodes` training episodes, then `to`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    start: float = Field(alias="from")
    end: float = Field(alias="to")
    episodes: int = Field(ge=1)

    def at(self, episodes_done: int) -> float:
        """Return the weight after `episodes_done` training episodes."""
        return self.start + (self.end - self.start) * min(1.0, max(0, episodes_done) / self.episodes)


@dataclass(frozen=True)
class RewardFunction:
    """Scores finished episodes. Its result depends on the episode and the weights' schedule alone.

    team, process[agent]: (name, term, weight) in the order of the config.
    """

    team: tuple[tuple[str, TeamTerm, Weight], ...]
    process: Mapping[str, tuple[tuple[str, ProcessTerm, Weight], ...]]
    format: Weight
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    max_hops: int = 3

    def score(self, episode: Episode, episodes_done: int = 0, value: float | None = None) -> None:
        """Fill `episode.team` and `episode.process`; `value` is V(s_1), None = the below-value guard is not applied."""
        episode.team, episode.process = {}, []
        team = self._score_team(episode, episodes_done)
        process = self._score_process(episode, episodes_done)
        episode.team, episode.process = team, process
        if value is not None:
            self.apply_value_guard(episode, value)

    def apply_value_guard(self, episode: Episode, value: float) -> bool:
        """Halve the positive process values where the team reward is below V(s_1) = `value`; True where it did.

        Once a scored episode.
        """
        _finite(value, f"the critic's first value of question {episode.question.id!r}")
        below = self.guards.below_value and sum(episode.team.values()) < value
        if below:
            episode.process = [halve_positive(terms) for terms in episode.process]
        return below

    def without_process(self) -> RewardFunction:
        """Return the same with no process terms; the format penalty stays."""
        return replace(self, process={})

    def weights_at(self, episodes_done: int) -> dict[str, float]:
        """Return every weight as it stands after `episodes_done` episodes, by "team.f1", "rewriter.stop_timing" ..."""
        out = {f"team.{name}": w.at(episodes_done) for name, _, w in self.team}
        for agent, terms in self.process.items():
            out.update({f"{agent}.{name}": w.at(episodes_done) for name, _, w in terms})
        return {**out, "format": self.format.at(episodes_done)}

    def _score_team(self, episode: Episode, episodes_done: int) -> dict[str, float]:
        out = {}
        for name, term, weight in self.team:
            told = f"team reward {name!r} of question {episode.question.id!r}"
            value = _finite(_scored(told, term.score_episode, episode), told)
            out[name] = _finite(weight.at(episodes_done) * value, told)
        if malformed_answer(episode):
            out = {**drop_positive(out), "format": self.format.at(episodes_done)}
        return out

    def baseline(self, episode: Episode, i: int, episodes_done: int, below: bool) -> float | None:
        """Return the mean process reward of the other orderings drawn for a ranking; None where there are none.

        The same candidates, question and past: what is left of the reward over it is the ordering's own doing (a
        baseline by the policy itself, as in RLOO, arXiv 2402.14740). `below`: the below-value guard halves.
        """
        own = episode.decisions[i]
        if own.completion is None or own.request is None or own.request.candidates is None or not own.completion.others:
            return None
        ids, by_id = own.request.candidates.ids, {p.id: p for p in own.received}
        branches = sum(d.agent == own.agent and d.step == own.step for d in episode.decisions)
        known: dict[tuple[int, ...], float] = {}
        for rows in own.completion.others:
            if rows not in known:
                value = tuple(ids[r] for r in rows)
                passages = type(own.update["passages"])([by_id[x] for x in value], own.hop + 1)
                other = replace(own, value=value, update={**own.update, "passages": passages})
                decisions = [*episode.decisions[:i], other, *episode.decisions[i + 1 :]]
                terms = self._terms_of(replace(episode, decisions=decisions), i, branches, episodes_done)
                known[rows] = sum((halve_positive(terms) if below else terms).values())
        return sum(known[rows] for rows in own.completion.others) / len(own.completion.others)

    def _terms_of(self, episode: Episode, i: int, branches: int, episodes_done: int) -> dict[str, float]:
        decision, terms = episode.decisions[i], {}
        for name, term, weight in self.process.get(decision.agent, ()):
            told = f"process reward {name!r} of agent {decision.agent!r}, question {episode.question.id!r}"
            value = _finite(_scored(told, term.score_decision, episode, i), told)
            value = _finite(weight.at(episodes_done) * value, told)
            if value > 0:
                value /= branches * (self.max_hops if term.per_hop else 1)
            terms[name] = value
        return terms

    def _score_process(self, episode: Episode, episodes_done: int) -> list[dict[str, float]]:
        branches = Counter((d.agent, d.step) for d in episode.decisions)
        leaked = leaks(episode) if self.guards.answer_in_query else frozenset()
        out = []
        for i, decision in enumerate(episode.decisions):
            terms: dict[str, float] = {}
            if not decision.forced and not decision.failed:
                terms = self._terms_of(episode, i, branches[decision.agent, decision.step], episodes_done)
                if decision.malformed or i in leaked:
                    terms = drop_positive(terms)
                if decision.malformed and decision.mode == "learn":
                    terms["format"] = self.format.at(episodes_done)
            out.append(terms)
        return out


def build_rewards(
    settings: Mapping[str, Any] | None = None, *, max_hops: int = 3, agents: Collection[str] | None = None
) -> RewardFunction:
    """Build what `rewards: {...}` says; an absent key is DEFAULT's (its terms of agents that are not there fall away).

    agents: names of the graph's agents, None = not checked. A `process` that is given stands alone: agents it does not
    name get no process reward.
    """
    settings = _mapping({} if settings is None else settings, "rewards")
    _known(settings, DEFAULT, "rewards")
    team = _terms(settings.get("team", DEFAULT["team"]), "rewards.team", TEAM, TeamTerm)
    if "process" in settings:
        given = _mapping(settings["process"], "rewards.process")
        if agents is not None:
            _known(given, agents, "rewards.process", "an unknown agent")
    else:
        given = {a: terms for a, terms in DEFAULT["process"].items() if agents is None or a in agents}
    process = {
        str(agent): _terms(terms, f"rewards.process.{agent}", PROCESS, ProcessTerm) for agent, terms in given.items()
    }
    penalty = _weight(settings.get("format", DEFAULT["format"]), "rewards.format")
    if max(penalty.start, penalty.end) > 0:
        raise ConfigError(
            f"rewards.format: got {settings['format']!r}, expected 0 or less; it is what malformed output costs: -0.2"
        )
    guards = _model(GuardsConfig, settings.get("guards", DEFAULT["guards"]), "rewards.guards")
    if isinstance(max_hops, bool) or not isinstance(max_hops, int) or max_hops < 1:
        raise ConfigError(f"graph.max_hops: got {max_hops!r}, expected an integer of at least 1; correct the value")
    return RewardFunction(team, process, penalty, guards, max_hops)


def config_rewards(config: Config, agents: Collection[str], max_hops: int) -> RewardFunction:
    """Build the rewards of a config for a graph of these agents; defaults of agents it lacks fall away."""
    settings = config.rewards.model_dump()
    if "process" not in config.rewards.model_fields_set:
        settings["process"] = {k: v for k, v in settings["process"].items() if k in agents}
    return build_rewards(settings, max_hops=max_hops, agents=agents)


def _terms(
    given: Any, key: str, known: Mapping[str, str | type[T]], base: type[T]
) -> tuple[tuple[str, T, Weight], ...]:
    """The terms of one list, each type at most once: two of one type would share their key in the log."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise ConfigError(f"{key}: got {given!r}, expected a list of terms; write [{{type: ..., weight: ...}}]")
    out: dict[str, tuple[str, T, Weight]] = {}
    for n, item in enumerate(given):
        at = f"{key}[{n}]"
        settings = dict(_mapping(item, at))
        name = settings.pop("type", None)
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                f"{at}.type: got {name!r}, expected one of {', '.join(known)}; correct the name, or name the plugin "
                f"that registers it under `plugins`.{nearest(str(name), known)}"
            )
        if name in out:
            raise ConfigError(f"{at}.type: got {name!r} a second time, expected each type once; add up their weights")
        weight = _weight(settings.pop("weight", 1.0), f"{at}.weight")
        out[name] = (name, _model(_load(known[name], at, name, base), settings, at, ("type", "weight")), weight)
    return tuple(out.values())


def _load(target: str | type[T], at: str, name: str, base: type[T]) -> type[T]:
    loaded: Any = target
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        try:
            loaded = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{at}.type: {name!r} is registered as {target!r}, expected an importable 'module:Class' ({error}); "
                f"correct what is registered"
            ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(
            f"{at}.type: {name!r} is registered as {loaded!r}, expected a subclass of "
            f"jointrag.rewards.{base.__name__}; derive it from that"
        )
    return loaded


def _weight(given: Any, key: str) -> Weight:
    if isinstance(given, Mapping):
        return _model(Weight, given, key)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        raise ConfigError(f"{key}: got {given!r}, expected a finite number or {{from: , to: , episodes: }}; correct it")
    return _model(Weight, {"from": given, "to": given, "episodes": 1}, key)


M = TypeVar("M", bound=BaseModel)


def _model(model: type[M], settings: Any, key: str, also: tuple[str, ...] = ()) -> M:
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        fields = [f.alias or name for name, f in model.model_fields.items()]
        raise ConfigError("; ".join(_told(e, key, [*also, *fields]) for e in error.errors())) from error


def _told(error: Any, key: str, known: list[str]) -> str:
    at = ".".join([key, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        name = str(error["loc"][-1])
        return f"{at}: got an unknown key, expected one of {', '.join(known)}; remove it.{nearest(name, known)}"
    if error["type"] == "missing":
        return f"{at}: got no such key, expected one; write {key}: {{{', '.join(f'{k}: ...' for k in known)}}}"
    return f"{at}: got {error['input']!r}, expected: {error['msg']}; correct the value"


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}: got {value!r}, expected keys and values; write {{...}}")
    return value


def _known(given: Mapping[str, Any], known: Collection[str], key: str, what: str = "an unknown key") -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{key}.{name}: got {what}, expected one of {', '.join(known)}; correct the name."
                f"{nearest(str(name), known)}"
            )


def _scored(told: str, score: Callable[..., Any], *given: Any) -> Any:
    try:
        return score(*given)
    except Exception as e:  # the boundary: a term may be a user's
        raise TrainingError(
            f"{told} failed with {type(e).__name__}: {e}; expected a number for every episode; correct the term or "
            f"drop it from the config"
        ) from e


def _finite(value: Any, told: str) -> float:
    if not isinstance(value, Real | np.bool_) or not abs(float(value)) <= LARGEST:
        raise TrainingError(
            f"{told} is {value!r}, expected a finite number within [-1, 1] before its weight (and at most "
            f"{LARGEST:g} in size in any case); correct the term or drop it from the config"
        )
    return float(value) + 0.0  # -0.0 becomes 0.0

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jointrag.graph.episode import Decision, Episode
from jointrag.marl.algorithms.ippo import Ippo
from jointrag.marl.critic import Critic
from jointrag.marl.learner import Learner

Build = Callable[..., tuple[Any, Any]]
Rollout = Callable[..., Sequence[Episode]]


def shake(pipeline: Any, head: str, size: float = 0.1, seed: int = 0) -> None:
    """Move a head away from where it is."""
    g = torch.Generator().manual_seed(seed)
    heads = pipeline.llm.heads
    heads.set_state(head, {k: v + size * torch.randn(v.shape, generator=g) for k, v in heads.state(head).items()})


def team_by_titles(episodes: Sequence[Episode]) -> None:
    """Pay the team by what was retrieved and answered, so that every agent has something to gain."""
    for e in episodes:
        signs = [sum(map(ord, str(d.value))) % 7 / 7 for d in e.decisions]
        e.team, e.process = {"signs": -sum(signs) / len(signs)}, [{} for _ in e.decisions]


# running again


@pytest.mark.parametrize("budget", ["null", "{searches: 1.0}"])
def test_an_episode_run_again_with_everyone_there_earns_what_it_earned(
    budget: str, warmed: Build, rollout: Rollout
) -> None:
    t, learner = warmed(
        "rewards.team=[{type: token_cost, weight: 1.0}]", "agents.retriever.temperature=5.0", f"marl.budget={budget}"
    )
    if learner.budget:
        learner.budget.excess = 1.0
    episodes = t._rollout(1, 5, learner.spare)
    assert any(e.spared for e in episodes) == (learner.budget is not None)
    learner.score(episodes, 0)
    rewards = np.array([sum(e.team.values()) for e in episodes])
    assert len(set(rewards)) > 1
    np.testing.assert_array_equal(learner.replay(episodes, rewards, frozenset()), rewards)
    without = learner.replay(episodes, rewards, frozenset({"filter"}))
    modes = {**t.modes, "filter": "default"}
    again = t.pipeline.run(
        [e.question for e in episodes], modes=modes, sample=True, seeds=[e.seed for e in episodes], spare=learner.spare
    )
    learner.score(again, 0)
    np.testing.assert_array_equal(without, [sum(e.team.values()) for e in again])
    assert (without != rewards).any()


# log-probs: rollout and update agree


@pytest.mark.parametrize("activation", ["late", "everywhere"])
def test_recomputed_log_probs_equal_the_sampled_ones(
    activation: str, warmed: Build, rollout: Rollout, pipe: Callable[..., Any]
) -> None:
    pipeline = pipe(max_hops=2, toy={"activation": activation})
    t, learner = warmed(
        "marl.episodes_per_update=16", "agents.filter.temperature=1.7", "agents.retriever.temperature=3.0",
        pipeline=pipeline,
    )  # fmt: skip
    for i, head in enumerate(("rewriter", "retriever", "filter", "answerer")):
        shake(t.pipeline, head, 0.05, i)
    samples = learner.samples(rollout(t))
    assert {s.decision.agent for s in samples} == {"rewriter", "retriever", "filter", "answerer"}
    assert any(not d.decision.completion.masks for d in samples)  # rankings are among them
    worst, positions = 0.0, 0
    for chunk in t.pipeline.llm.chunks([s.act for s in samples], size=5):
        with torch.no_grad():
            logp, entropy = t.pipeline.llm.evaluate(chunk)
        for b, row in enumerate(chunk.rows):
            sampled = torch.tensor(samples[row].act[1].logprobs)
            assert bool(chunk.used_BT[b, : len(sampled)].all())
            assert logp[b, len(sampled) :].abs().sum() == 0  # padding
            assert bool(torch.isfinite(entropy[b]).all())
            worst = max(worst, float((logp[b, : len(sampled)] - sampled).abs().max()))
            positions += len(sampled)
    assert positions > 100
    assert worst < 1e-4


def test_the_same_decisions_are_scored_alike_whatever_the_chunk(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed()
    acts = [s.act for s in learner.samples(rollout(t))]

    def logps(size: int) -> list[float]:
        out = [0.0] * len(acts)
        for chunk in t.pipeline.llm.chunks(acts, size=size):
            with torch.no_grad():
                for row, x in zip(chunk.rows, t.pipeline.llm.evaluate(chunk)[0].sum(1).tolist(), strict=True):
                    out[row] = x
        return out

    np.testing.assert_allclose(logps(1), logps(64), atol=1e-3, rtol=1e-5)


# the critic


def last(episode: Episode, agent: str) -> Decision:
    return episode.of(agent)[-1]


@pytest.mark.parametrize("edited", ["rewriter", "retriever", "filter"])
def test_the_central_critic_sees_another_agents_action_and_a_local_one_does_not(
    edited: str, warmed: Build, rollout: Rollout
) -> None:
    t, learner = warmed()
    heads = t.pipeline.llm.heads
    heads.set_state("critic", {k: v + 0.1 for k, v in heads.state("critic").items()})
    local = Learner(t.pipeline, t.config, t.rewards, Ippo())
    assert (learner.critic.local, local.critic.local) == (False, True)
    episode = next(e for e in rollout(t) if e.of("filter"))
    answer = next(i for i, d in enumerate(episode.decisions) if d.agent == "answerer")

    def value(of: Learner) -> float:
        _, where, values = of.values([episode])
        return float(values[where.index((0, answer)), 0])

    before = value(learner), value(local)
    decision = last(episode, edited)
    decision.value = ("Zal Hill",) if edited == "rewriter" else tuple(p.id for p in decision.received[1:3])
    after = value(learner), value(local)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_privileged_critic_sees_gold_and_another_does_not(warmed: Build, rollout: Rollout) -> None:
    t, _ = warmed()
    episode = next(e for e in rollout(t) if e.question.answerable)
    other = replace(episode, question=replace(episode.question, answers=("Zal Hill",)))
    for privileged in (True, False):
        critic = Critic(t.pipeline.llm, t.pipeline.index, privileged, local=False)
        asked = [[r.suffix for r, _ in critic.requests([e])[0]] for e in (episode, other)]
        assert (asked[0] != asked[1]) is privileged


def test_the_critics_scale_and_its_inverse_agree(warmed: Build) -> None:
    _, learner = warmed()
    critic = learner.critic
    critic.team.add(np.array([1.0, 3.0]))  # mean 2, std 1
    critic.own.add(np.array([0.5, 0.5]))  # mean 0.5, std 0, of which no less than 0.05 is taken
    torch.testing.assert_close(critic.scale(torch.tensor([[1.0, 2.0]])), torch.tensor([[3.0, 0.6]]))
    torch.testing.assert_close(critic.normalised(torch.tensor([[3.0, 0.6]])), torch.tensor([[1.0, 2.0]]))


def test_the_value_clip_is_measured_from_what_the_critic_said(
    warmed: Build, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New statistics move the units of the targets, not the critic: at its first step nothing is clipped."""
    t, learner = warmed()
    seen: list[float] = []

    def record(value: torch.Tensor, old: torch.Tensor, goal: torch.Tensor, clip: float) -> torch.Tensor:
        seen.append(float((value - old).abs().max().detach()))
        return (value - goal) ** 2

    monkeypatch.setattr("jointrag.marl.losses.value_loss", record)
    episodes = rollout(t)
    for e in episodes:
        e.team = {"far": 3.0}
    learner.fit_critic(episodes, 1, 0)
    assert seen[0] < 1e-4


def test_fitting_the_critic_explains_the_rewards(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed("marl.critic.lr=0.02")
    episodes = rollout(t)
    team_by_titles(episodes)
    first = learner.fit_critic(episodes, 1, 0)
    for i in range(8):
        log = learner.fit_critic(episodes, 1, i)
    assert log["loss"] < 0.5 * first["loss"]
    assert log["explained_variance"] > 0.4


# what trains


def test_advantages_are_normalised_over_each_agents_own_or_over_all(warmed: Build, rollout: Rollout) -> None:
    spread = {}
    for over in ("agent", "all"):
        t, learner = warmed("marl.episodes_per_update=12", f"marl.normalise={over}")
        learner.update(rollout(t), 0, 1.0)
        spread[over] = {n: r.weight > 0 for n, r in learner.spread.items()}
    assert spread["agent"] == {**dict.fromkeys(learner.learning, True), "*": False}
    assert spread["all"] == {**dict.fromkeys(learner.learning, False), "*": True}


def test_forced_and_failed_decisions_are_out_of_loss_and_statistics(warmed: Build, rollout: Rollout) -> None:
    logs = []
    for paid in (0.0, 1000.0):
        t, learner = warmed("marl.episodes_per_update=12")
        episodes = rollout(t)
        trained = [d for e in episodes for d in e.of("retriever")]
        trained[0].failed = True
        trained[1].forced = True
        for e in episodes:
            for d, terms in zip(e.decisions, e.process, strict=True):
                if d.forced or d.failed:
                    terms["paid"] = paid
        samples = learner.samples(episodes)
        assert not any(s.decision.forced or s.decision.failed for s in samples)
        assert not any(s.decision is d for s in samples for d in trained[:2])
        log = learner.update(episodes, 0, 1.0)
        assert log["agents"]["retriever"]["decisions"] == len(trained) - 2
        logs.append((log["agents"], {n: (r.mean, r.square) for n, r in learner.spread.items()}))
    for agent in logs[0][0]:
        for key in ("advantage_mean", "advantage_std", "process"):
            assert logs[0][0][agent][key] == logs[1][0][agent][key]
    assert logs[0][1] == logs[1][1]


def test_minibatches_are_random_decisions_of_one_head_each_once(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed("marl.minibatch=7")
    samples = learner.samples(rollout(t))
    acts = [s.act for s in samples]
    batches = learner.minibatches(acts, 3)
    rows = [[row for chunk in batch for row in chunk.rows] for batch in batches]
    assert sorted(r for batch in rows for r in batch) == list(range(len(acts)))
    assert max(map(len, rows)) <= 7
    assert all(len({acts[r][0].head for r in batch}) == 1 for batch in rows)
    assert rows == [[row for chunk in batch for row in chunk.rows] for batch in learner.minibatches(acts, 3)]
    assert rows != [[row for chunk in batch for row in chunk.rows] for batch in learner.minibatches(acts, 4)]


def test_episodes_in_which_a_node_crashed_teach_nobody(warmed: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    t, learner = warmed()
    said: list[str] = []
    t.say, real = said.append, t._rollout

    def crashed(update: int, seed: int, *spare: Any) -> Sequence[Episode]:
        episodes = real(update, seed, *spare)
        episodes[0].error = "KeyError: 'x'"
        return episodes

    monkeypatch.setattr(t, "_rollout", crashed)

    def taught(episodes: Sequence[Episode], *_: Any) -> Any:
        raise Stop(len(episodes))

    monkeypatch.setattr(learner, "update", taught)
    with pytest.raises(Stop, match=r"^7$"):
        t._update(learner, 1, {})
    assert said == ["update 1: 1 of 8 episodes failed, the first with KeyError: 'x'"]


def test_searches_that_failed_leave_the_retriever_without_decisions(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed()
    episodes = rollout(t)
    for e in episodes:
        for d in e.of("retriever"):
            d.failed = "TimeoutError: slow"
    before = t.pipeline.llm.heads.hash("retriever")
    log = learner.update(episodes, 0, 1.0)
    assert log["agents"]["retriever"]["decisions"] == 0
    assert log["agents"]["answerer"]["decisions"] > 0
    assert t.pipeline.llm.heads.hash("retriever") == before


@pytest.mark.parametrize("mode", ["frozen", "default", "oracle"])
def test_an_agent_held_in_a_mode_takes_no_step_while_the_others_do(mode: str, warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed(f"agents.filter.mode={mode}")
    heads = t.pipeline.llm.heads
    before = {h: heads.hash(h) for h in heads.names}
    episodes = rollout(t)
    held = [d for e in episodes for d in e.of("filter")]
    assert held
    assert {d.mode for d in held} == {mode}
    assert not any(d.request.sample for d in held if d.request)  # greedy
    log = learner.update(episodes, 0, 1.0)
    assert set(log["agents"]) == {"rewriter", "retriever", "answerer"}
    after = {h: heads.hash(h) for h in heads.names}
    changed = {h for h in before if after[h] != before[h]}
    assert changed == {"rewriter", "retriever", "answerer", "critic"}


def test_an_agent_rests_between_its_intervals(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed("agents.answerer.interval=2")
    heads = t.pipeline.llm.heads
    moved = []
    for number in (1, 2, 3):
        before = heads.hash("answerer"), heads.hash("rewriter")
        log = learner.update(rollout(t, number), number, 1.0, number)
        moved.append((heads.hash("answerer") != before[0], heads.hash("rewriter") != before[1]))
        assert log["agents"]["answerer"]["decisions"] > 0  # it is still described
    assert moved == [(False, True), (True, True), (False, True)]


def test_without_process_rewards_each_head_has_a_gradient_from_the_team_alone(warmed: Build, rollout: Rollout) -> None:
    quiet = [f"agents.{a}.{k}=0.0" for a in ("rewriter", "retriever", "filter", "answerer") for k in QUIET]
    t, learner = warmed("rewards.process={}", "marl.episodes_per_update=12", *quiet)
    assert not t.rewards.process
    before = {h: t.pipeline.llm.heads.hash(h) for h in learner.optimizers}
    episodes = rollout(t)
    team_by_titles(episodes)
    log = learner.update(episodes, 0, 1.0)
    for agent, of in log["agents"].items():
        assert of["gradient"] > 1e-3, agent
        assert of["process"] == {}
    assert [h for h, x in before.items() if t.pipeline.llm.heads.hash(h) == x] == []


QUIET = ("kl.beta", "kl.floor", "entropy")  # nothing but the advantage moves a head


def test_no_reward_and_no_bonus_move_no_head(warmed: Build, rollout: Rollout) -> None:
    quiet = [f"agents.{a}.{k}=0.0" for a in ("rewriter", "retriever", "filter", "answerer") for k in QUIET]
    t, learner = warmed("rewards.process={}", "marl.epochs=1", *quiet)
    episodes = rollout(t)
    for e in episodes:
        e.team, e.process = {"none": 0.0}, [{} for _ in e.decisions]
    log = learner.update(episodes, 0, 1.0)
    # an untrained critic says 0, so every advantage is 0
    assert all(of["gradient"] == 0.0 and of["advantage_std"] == 0.0 for of in log["agents"].values())


def test_a_good_update_makes_the_paid_actions_likelier(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed("marl.episodes_per_update=16", "marl.clip=10.0", "marl.epochs=4")
    episodes = rollout(t)
    team_by_titles(episodes)
    samples = learner.samples(episodes)
    learner.update(episodes, 0, 1.0)
    _, where, values = learner.values(episodes)
    paid = learner.credit(episodes, where, np.zeros_like(values))
    for agent in learner.learning:
        mine = [s for s in samples if s.decision.agent == agent]
        advantage = np.array([paid[s.episode].advantages[s.index] for s in mine])
        gain = np.zeros(len(mine))
        for chunk in t.pipeline.llm.chunks([s.act for s in mine]):
            with torch.no_grad():
                logp = t.pipeline.llm.evaluate(chunk)[0].sum(1).tolist()
            for row, x in zip(chunk.rows, logp, strict=True):
                gain[row] = x - sum(mine[row].act[1].logprobs)
        assert float(np.mean(gain * (advantage - advantage.mean()))) > 0, agent


# the reference


def test_the_kl_reference_is_the_warm_head(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed()
    samples = learner.samples(rollout(t))
    learner.references(samples)
    for s in samples:  # nothing has moved yet: the warm head is the policy
        np.testing.assert_allclose(s.reference, s.act[1].logprobs, atol=1e-4)
    shake(t.pipeline, "answerer")  # the policy moves, the reference stays
    kept = [s.reference for s in samples]
    learner.references(samples)
    assert [s.reference for s in samples] == kept
    shake(t.pipeline, "answerer@warm")
    learner.references(samples)
    moved = {s.decision.agent for s, old in zip(samples, kept, strict=True) if s.reference != old}
    assert moved == {"answerer"}


def test_kl_to_warm_is_zero_at_first_and_counts_nats_a_decision_later(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed()
    episodes = rollout(t)
    log = learner.update(episodes, 0, 1.0)
    assert all(abs(of["kl_to_warm"]) < 1e-4 for of in log["agents"].values())
    for i in range(2):
        log = learner.update(rollout(t, i), i, 10.0)
    assert max(of["kl_to_warm"] for of in log["agents"].values()) > 0.01


def test_a_strong_kl_holds_the_heads_near_their_warm_start(warmed: Build, rollout: Rollout) -> None:
    drift = []
    for beta in (0.0, 50.0):
        t, learner = warmed(
            f"agents.answerer.kl.beta={beta}", "agents.answerer.kl.floor=0.0", "agents.answerer.lr=0.003"
        )
        for i in range(5):
            log = learner.update(rollout(t, i), i, 1.0)
        drift.append(log["agents"]["answerer"]["kl"])
    assert drift[1] < 0.5 * drift[0], drift


# state


def test_a_learner_set_to_a_stored_state_goes_on_alike(warmed: Build, rollout: Rollout) -> None:
    t, learner = warmed()
    learner.update(rollout(t, 1), 1, 1.0)
    heads = t.pipeline.llm.heads
    stored = copy.deepcopy(learner.state()), {h: heads.state(h) for h in heads.names}
    other_t, other = warmed()
    for h, state in stored[1].items():
        other_t.pipeline.llm.heads.set_state(h, state)
    other.set_state(stored[0])
    logs = []
    for trainer_, learner_ in ((t, learner), (other_t, other)):
        trainer_.pipeline.llm.forget()
        logs.append(learner_.update(rollout(trainer_, 2), 2, 0.5))
    assert logs[0] == logs[1]
    assert all(heads.hash(h) == other_t.pipeline.llm.heads.hash(h) for h in heads.names)


@pytest.mark.parametrize("sharing", ["shared", {"retrieval": ["rewriter", "filter"]}])
def test_agents_that_share_a_head_train_it_together(
    sharing: Any, pipe: Callable[..., Any], trainer: Callable[..., Any], tmp_path: Any
) -> None:
    pipeline = pipe(max_hops=2, heads=sharing)
    t = trainer(tmp_path / "run", "warm_start.steps=0", "marl.updates=1", "marl.epochs=1", pipeline=pipeline)
    result = t.train()
    assert set(result.metrics[0]["agents"]) == {"rewriter", "retriever", "filter", "answerer"}
    own = {"shared"} if sharing == "shared" else {"retrieval", "retriever", "answerer"}
    assert {p.name for p in (tmp_path / "run" / "heads").iterdir()} == own

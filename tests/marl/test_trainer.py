from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jointrag.data.errors import CheckpointError, ConfigError, DataError, TrainingError
from jointrag.graph.episode import Episode
from jointrag.rewards.base import TeamTerm

AGENTS = ("rewriter", "retriever", "filter", "answerer")
BEHAVIOUR = {"rewriter": {"queries"}, "retriever": set(), "filter": {"empty"}, "answerer": {"answered"}}
PER_AGENT = {
    "decisions", "advantage_mean", "advantage_std", "advantage_team", "advantage_size", "process", "malformed",
    "kl_to_warm", "length", "kl", "entropy", "clipped", "gradient", "explained_variance", "beta",
}  # fmt: skip


QUICK = ("warm_start.steps=0", "marl.episodes_per_update=4", "marl.epochs=1", "marl.average=0", "eval.questions=2")


class Nan(TeamTerm):
    """A reward that is no number."""

    def score_episode(self, episode: Episode) -> float:
        """Return NaN."""
        return float("nan")


# one whole training


def test_two_updates_change_all_four_heads_and_the_critic_but_not_the_trunk(trained: Any) -> None:
    warm, *after = trained.log.hashes
    assert len(after) == 2
    for head in (*AGENTS, "critic"):
        assert len({warm[head], after[0][head], after[1][head]}) == 3, head
    heads = trained.trainer.pipeline.llm.heads
    heads.check_trunk()
    from jointrag.llm.toy import toy_model

    assert heads.trunk_hash == toy_model().heads.trunk_hash


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_checkpoint_as_from_a_hub_trains_two_updates(
    arch: str, trainer: Callable[..., Any], log: Any, small: Any, four: Any, tmp_path: Path
) -> None:
    from jointrag.graph.pipeline import Pipeline
    from jointrag.llm.toy import save_toy

    model = save_toy(tmp_path / "model", arch, chat_template=True)
    pipeline = Pipeline(*four(), llm=str(model), index=small.index, max_hops=2, max_context=1000)
    trunk = pipeline.llm.heads.trunk_hash
    result = trainer(tmp_path / "run", "warm_start.steps=2", log=log, pipeline=pipeline).train()
    warm, _, after = log.hashes
    assert len(result.metrics) == 2 and not any(m["errors"] for m in result.metrics)
    assert all(warm[head] != after[head] for head in (*AGENTS, "critic"))
    assert pipeline.llm.heads.trunk_hash == trunk
    pipeline.llm.heads.check_trunk()


def test_a_run_trained_from_python_is_loaded_where_its_pipeline_is_known(
    trained: Any, pipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jointrag import load
    from jointrag.configs.load import dump_config
    from jointrag.configs.schema import Config
    from jointrag.marl.trainer import LIVE

    assert LIVE[str(trained.result.out.resolve())] is trained.trainer.pipeline
    own, out = trained.trainer.pipeline, tmp_path / "run"
    shutil.copytree(trained.result.out, out)
    (out / "config.yaml").write_text(dump_config(Config()))  # as Trainer writes it where no config was given
    shutil.copytree(out, tmp_path / "elsewhere")
    monkeypatch.setitem(LIVE, str(out.resolve()), own)
    assert load(out) is own
    other = pipe()
    assert load(out, pipeline=other) is other
    assert other.llm.heads.hash("filter") == own.llm.heads.hash("filter")
    with pytest.raises(CheckpointError, match=r"as for training and write jointrag\.load\(.*pipeline="):
        load(tmp_path / "elsewhere")


def test_settings_out_of_range_are_refused(trainer: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Trainer: updates: got -1, expected"):
        trainer(tmp_path / "run", updates=-1)


def test_a_pipeline_keeps_the_modes_its_run_held(trainer: Callable[..., Any], tmp_path: Path) -> None:
    t = trainer(tmp_path / "run", *QUICK, "marl.updates=0", "agents.filter.mode=default")
    t.train()
    (decision, *_) = t.pipeline.invoke("Who leads Tibur Gate ?")["episode"].of("filter") or [None]
    assert t.pipeline.modes == {"filter": "default"}
    assert decision is None or decision.mode == "default"


def test_the_warm_heads_are_kept_and_frozen(trained: Any) -> None:
    heads = trained.trainer.pipeline.llm.heads
    for head in AGENTS:
        assert heads.hash(f"{head}@warm") == trained.log.hashes[0][head]
        assert not any(p.requires_grad for p in heads.named(f"{head}@warm").values())


def test_metrics_have_every_key_of_every_agent_and_no_clock(trained: Any) -> None:
    lines = (trained.result.out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["update"] for r in records] == [1, 2]
    assert [r["episodes"] for r in records] == [8, 16]
    for r in records:
        assert set(r) == {
            "update", "episodes", "train_f1", "team_reward", "searches", "errors", "failed", "rate", "agents", "critic",
            "dev_f1", "warnings",
        }  # fmt: skip
        assert set(r["agents"]) == set(AGENTS)
        for agent in AGENTS:
            assert set(r["agents"][agent]) - {"silence"} == PER_AGENT | BEHAVIOUR[agent]
        assert set(r["critic"]) == {"loss", "explained_variance"}
    assert records == trained.result.metrics == trained.log.records
    clock = [json.loads(x) for x in (trained.result.out / "timing.jsonl").read_text().splitlines()]
    assert [c.get("update", c.get("what")) for c in clock] == ["warm_start", 1, 2]


def test_the_run_folder_holds_config_graph_checkpoint_and_heads(trained: Any) -> None:
    out = trained.result.out
    from jointrag.configs.load import load_config

    assert load_config(out / "config.yaml") == trained.trainer.config
    assert "rewriter" in (out / "graph.mermaid").read_text()
    assert (out / "checkpoint" / "state.pt").is_file()
    assert sorted(p.name for p in (out / "heads").iterdir()) == sorted(AGENTS)
    summary = json.loads((out / "training.json").read_text())
    assert summary["warm"]["form"] == "title"
    assert set(summary["dev_f1"]) == {"0", "1", "2"}


def test_saved_heads_are_those_the_pipeline_is_left_with(trained: Any, pipe: Callable[..., Any]) -> None:
    from jointrag.marl.trainer import load_heads

    other = pipe(max_hops=2)
    load_heads(other, trained.result.out / "heads")
    left = trained.trainer.pipeline.llm.heads
    assert {h: other.llm.heads.hash(h) for h in AGENTS} == {h: left.hash(h) for h in AGENTS}


@pytest.mark.parametrize(
    ("scores", "best"), [([0.1, 0.3, 0.2], 1), ([0.4, 0.3, 0.4], 0), ([0.1, 0.2, 0.3], 2)], ids=str
)
def test_the_best_checkpoint_is_the_one_with_the_best_dev_f1(
    scores: Sequence[float], best: int, trainer: Callable[..., Any], log: Any, tmp_path: Path
) -> None:
    t = trainer(tmp_path / "run", *QUICK, log=log)
    left = iter(scores)
    t._dev = lambda: (next(left), 2.0)
    result = t.train()
    assert result.best_update == best
    assert dict(result.dev_f1) == dict(enumerate(scores))
    heads = t.pipeline.llm.heads
    assert {h: heads.hash(h) for h in AGENTS} == {h: log.hashes[best][h] for h in AGENTS}


def test_under_a_search_budget_the_best_checkpoint_keeps_it(trainer: Callable[..., Any], tmp_path: Path) -> None:
    looks = [(0.9, 2.0), (0.6, 1.4), (0.5, 1.0), (0.7, 1.5)]  # F1, searches: the best that keeps 1.5 is the last
    sets = ("marl.budget={searches: 1.5}", "marl.updates=3")
    t = trainer(tmp_path / "run", *QUICK, *sets)
    left = iter(looks)
    t._dev = lambda: next(left)
    assert t.train().best_update == 3
    t = trainer(tmp_path / "none", *QUICK, "marl.budget={searches: 0.5}", "marl.updates=3")
    left = iter(looks)
    t._dev = lambda: next(left)
    assert t.train().best_update == 2  # none keeps it: the fewest searches


def test_heads_are_measured_and_kept_as_running_means_and_trained_on_as_they_are(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    from jointrag.marl import checkpoint

    t = trainer(tmp_path / "run", *QUICK, "marl.average=0.75", "marl.updates=1", "agents.filter.mode=frozen")
    heads, measured = t.pipeline.llm.heads, []

    def dev() -> tuple[float, float]:
        measured.append(heads.state("answerer"))
        return float(len(measured)), 2.0

    t._dev = dev
    t.train()
    stored = checkpoint.load(tmp_path / "run" / "checkpoint")["heads"]
    for key, warm in stored["answerer@warm"].items():
        mean = 0.75 * warm + 0.25 * stored["answerer"][key]
        torch.testing.assert_close(heads.state("answerer")[key], mean)
        torch.testing.assert_close(measured[1][key], mean)
    assert heads.hash("filter") == heads.hash("filter@warm")


def test_a_frozen_filter_keeps_its_head_through_training(trainer: Callable[..., Any], log: Any, tmp_path: Path) -> None:
    t = trainer(tmp_path / "run", "agents.filter.mode=frozen", "warm_start.steps=1", "eval.questions=2", log=log)
    result = t.train()
    assert {h["filter"] for h in log.hashes} == {log.hashes[0]["filter"]}
    assert all(log.hashes[0][h] != log.hashes[2][h] for h in ("rewriter", "retriever", "answerer"))
    assert all("filter" not in r["agents"] for r in result.metrics)
    assert t.pipeline.llm.heads.hash("filter") == log.hashes[0]["filter"]


def test_ippo_trains_every_head_with_a_local_critic(trainer: Callable[..., Any], log: Any, tmp_path: Path) -> None:
    t = trainer(tmp_path / "run", "marl.algorithm=ippo", *QUICK, log=log)
    t.train()
    assert all(log.hashes[0][h] != log.hashes[2][h] for h in AGENTS)


def test_learning_rates_fall_linearly_to_the_final_share(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jointrag.marl import learner

    seen: list[dict[str, list[float]]] = []
    inner = learner.Learner.update

    def update(self: Any, *args: Any) -> Any:
        out = inner(self, *args)
        seen.append({h: [g["lr"] for g in o.param_groups] for h, o in self.optimizers.items()})
        return out

    monkeypatch.setattr(learner.Learner, "update", update)
    t = trainer(
        tmp_path / "run", *QUICK, "marl.updates=3", "marl.final_rate=0.2",
        "agents.retriever.lr=0.001", "agents.retriever.projection_lr=0.0001", "agents.answerer.lr=0.002",
        "marl.critic.lr=0.003", "eval.every=3",
    )  # fmt: skip
    result = t.train()
    assert [r["rate"] for r in result.metrics] == pytest.approx([1.0, 0.6, 0.2])
    assert ["dev_f1" in r for r in result.metrics] == [False, False, True]
    for rate, of in zip((1.0, 0.6, 0.2), seen, strict=True):
        assert of["retriever"] == pytest.approx([0.001 * rate, 0.0001 * rate])  # its projection has its own
        assert of["answerer"] == pytest.approx([0.002 * rate])
        assert of["critic"] == pytest.approx([0.003 * rate])


def test_each_pass_over_the_questions_asks_every_one_once(trainer: Callable[..., Any], tmp_path: Path) -> None:
    t = trainer(tmp_path / "run", "marl.episodes_per_update=8")
    asked: list[tuple[Any, int]] = []
    t.pipeline = type("Recorder", (), {"run": lambda self, qs, seeds, **_: asked.extend(zip(qs, seeds, strict=True))})()
    for update in range(1, 7):
        t._rollout(update, update)
    ids = [q.id for q, _ in asked]
    assert sorted(ids[:24]) == sorted(ids[24:]) == sorted(q.id for q in t.train_questions)
    assert ids[:24] != ids[24:]
    assert len({seed for _, seed in asked}) == 48  # the same question again is sampled anew


# what is refused


def test_a_reward_that_is_no_number_stops_the_run_and_names_the_term(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    t = trainer(tmp_path / "run", *QUICK)
    name, _, weight = t.rewards.team[0]
    t.rewards = replace(t.rewards, team=((f"my_{name}", Nan(), weight),))
    with pytest.raises(TrainingError, match=r"team reward 'my_f1' of question .* is nan, expected a finite number"):
        t.train()


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_head(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.setattr("jointrag.marl.losses.normalise", lambda raw, *_: np.full(len(raw), np.nan))
    t = trainer(tmp_path / "run", *QUICK)
    with pytest.raises(TrainingError, match=r"loss of head '\w+' is nan"):
        t.train()


def test_unknown_settings_and_agents_and_empty_sets_are_refused(
    trainer: Callable[..., Any], pipe: Callable[..., Any], small: Any, tmp_path: Path
) -> None:
    from jointrag.marl.trainer import Trainer

    pipeline = pipe()
    with pytest.raises(ConfigError, match="unknown setting 'updtes'"):
        Trainer(pipeline, small.questions, out=tmp_path, updtes=3)
    with pytest.raises(ConfigError, match="'reader'"):
        trainer(tmp_path, "agents.reader.mode=frozen")
    with pytest.raises(ConfigError, match=r"algorithm: got 'mapo'.*mappo"):
        trainer(tmp_path, "marl.algorithm=mapo")
    with pytest.raises(DataError, match="train: got no questions"):
        Trainer(pipeline, [], out=tmp_path)
    with pytest.raises(DataError, match="dev"):
        Trainer(pipeline, small.questions[:1], out=tmp_path)


def test_without_dev_questions_the_last_tenth_chooses_and_is_not_trained_on(
    pipe: Callable[..., Any], small: Any, tmp_path: Path
) -> None:
    from jointrag.marl.trainer import Trainer

    t = Trainer(pipe(), small.questions, out=tmp_path, updates=7)
    assert t.config.marl.updates == 7
    assert t.dev == small.questions[54:]
    assert t.train_questions == small.questions[:54]


def test_train_works_inside_a_running_event_loop(trainer: Callable[..., Any], tmp_path: Path) -> None:
    async def notebook() -> Any:
        return trainer(tmp_path / "run", *QUICK, "warm_start.steps=1", "marl.updates=1").train()

    result = asyncio.run(notebook())
    assert [r["update"] for r in result.metrics] == [1]

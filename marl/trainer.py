"""Trainer: warm start, then joint updates, with checkpoints that make a resumed run repeat an undisturbed one."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from datasets import Dataset
from pydantic import ValidationError
from safetensors import SafetensorError

from jointrag.configs.load import dump_config
from jointrag.configs.schema import Config
from jointrag.data.errors import CheckpointError, ConfigError, DataError, DivergedError, StorageError, nearest
from jointrag.data.files import read_questions
from jointrag.data.types import Question
from jointrag.eval.evaluation import write_json_atomic
from jointrag.graph.episode import Episode
from jointrag.graph.pipeline import CRITIC, Pipeline
from jointrag.llm.scheduler import stable_seed
from jointrag.marl import checkpoint
from jointrag.marl.health import symptoms
from jointrag.marl.learner import Learner
from jointrag.marl.registry import algorithm
from jointrag.marl.warm_start import WarmSettings, f1_of, warm_start
from jointrag.rewards.build import config_rewards

Say = Callable[[str], None]
SLACK = 1.02  # times the budget that mean searches on dev may be
LIVE: WeakValueDictionary[str, Pipeline] = WeakValueDictionary()  # run folder -> what was trained into it here


@dataclass(frozen=True)
class Result:
    """What a training reached. `dev_f1[u]` is the greedy dev F1 after update u (0 = warm start)."""

    out: Path
    warm: Mapping[str, Any]
    dev_f1: Mapping[int, float]
    best_update: int
    metrics: Sequence[Mapping[str, Any]] = field(default=(), repr=False)


def split_dev(train: list[Question], dev: list[Question] | None) -> tuple[list[Question], list[Question]]:
    """Return (train, dev): without dev questions the last tenth, at most 200, chooses and is not trained on."""
    if dev:
        return train, dev
    if len(train) < 2:
        raise DataError("train: got one question and no dev set; expected at least two questions, or dev=...")
    cut = max(1, min(200, len(train) // 10))
    return train[:-cut], train[-cut:]


def load_questions(source: str | Path | Sequence[Question], ids: set[str], what: str) -> list[Question]:
    """Return questions from a file or a list, at least one."""
    questions = read_questions(source, ids) if isinstance(source, str | Path) else list(source)
    if not questions:
        raise DataError(f"{what}: got no questions; expected at least one")
    return questions


def warm_settings(config: Config) -> WarmSettings:
    """Return the warm start's settings."""
    w = config.warm_start
    return WarmSettings(w.questions, w.steps, w.lr, w.projection_lr, w.batch, stable_seed(config.seed, "warm") % 2**31)


class Trainer:
    """Trains a pipeline jointly. `train`, `dev`: files or question lists; keyword arguments set keys of `marl`.

    The run folder `out` holds config, metrics, checkpoint and heads. `train()` may be called inside a running event
    loop. A run that was stopped goes on with `resume=True` and gives the numbers of an undisturbed one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        train: str | Path | Sequence[Question],
        dev: str | Path | Sequence[Question] | None = None,
        *,
        out: str | Path | None = None,
        config: Config | None = None,
        resume: bool = False,
        say: Say = lambda _: None,
        on_update: Callable[[Mapping[str, Any]], None] = lambda _: None,
        after_warm_start: Callable[[Mapping[str, Any]], None] = lambda _: None,
        **marl: Any,
    ) -> None:
        config = config or Config()
        unknown = [k for k in marl if k not in type(config.marl).model_fields]
        if unknown:
            raise ConfigError(
                f"Trainer: unknown setting {unknown[0]!r}; expected one of {sorted(type(config.marl).model_fields)}."
                f"{nearest(unknown[0], type(config.marl).model_fields)}"
            )
        if marl:
            try:
                settings = type(config.marl).model_validate(config.marl.model_dump() | marl)
            except ValidationError as e:
                first = e.errors()[0]
                key, told = ".".join(map(str, first["loc"])), first["msg"]
                raise ConfigError(f"Trainer: {key}: got {first['input']!r}, expected: {told}; correct it") from e
            config = config.model_copy(update={"marl": settings})
        self.config = config if out is None else config.model_copy(update={"out": str(out)})
        self.pipeline, self.resume, self.say, self.on_update = pipeline, resume, say, on_update
        self.after_warm_start = after_warm_start
        self.out = Path(self.config.out)
        ids = set(pipeline.index.ids)
        self.train_questions = load_questions(train, ids, "train")
        given = None if dev is None else load_questions(dev, ids, "dev")
        self.train_questions, self.dev = split_dev(self.train_questions, given)
        self.dev = self.dev[: self.config.eval.questions]
        self.rows = Dataset.from_dict({"row": range(len(self.train_questions))})
        names = [a.name for a in pipeline.agents]
        for name in self.config.agents:
            pipeline.agent(name)
        for a in pipeline.agents:
            pipeline.temperature[a.name] = self.config.agent(a.name).temperature
        self.rewards = config_rewards(self.config, names, pipeline.max_hops)
        self.algorithm = algorithm(self.config.marl.algorithm, self.config.marl.credit)
        self.modes = {a.name: self.config.agent(a.name).mode_name for a in pipeline.agents}
        self.own_heads = list(dict.fromkeys(pipeline.head_of.values()))
        for n in [n for n, mode in self.modes.items() if mode == "frozen"]:
            beside = [a for a in pipeline.acting_by(pipeline.head_of.get(n, "")) if self.modes[a] == "learn"]
            if beside:
                raise ConfigError(
                    f"agents.{n}.mode: got frozen for an agent whose head {beside[0]!r} trains too; expected a head of "
                    f"its own: write `mode: warm` (it acts by its warm start), or `llm.heads: separate`"
                )

    # the run folder

    @functools.cached_property
    def _identity(self) -> str:
        """A hash of everything that decides the numbers of this run."""
        what = self.config.model_dump(exclude={"out"}) | {"template": self.pipeline.fingerprint}
        what |= {"corpus": self.pipeline.index.fingerprint, "trunk": self.pipeline.llm.heads.trunk_hash}
        what |= {"questions": [repr(q) for q in (*self.train_questions, *self.dev)]}
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()

    def _open(self) -> dict[str, Any] | None:
        """Prepare the run folder; return the checkpoint to go on from."""
        state = checkpoint.load(self.out / "checkpoint")
        finished = [name for name in ("heads", "eval.json") if (self.out / name).exists()]
        if state is None and finished:
            raise CheckpointError(
                f"{self.out} holds {' and '.join(finished)} of a run without its checkpoint; expected a new folder, or "
                f"a whole run: set out=..., or remove it"
            )
        if state is not None and not self.resume:
            raise CheckpointError(
                f"{self.out} holds a run already; expected a new folder: set out=..., or go on with --resume (Trainer: "
                f"resume=True)"
            )
        if state is not None and state["identity"] != self._identity:
            raise CheckpointError(
                f"{self.out} holds a run of another config, corpus, trunk or questions; expected the same to resume: "
                f"set out=... for a new run"
            )
        log = self.out / "metrics.jsonl"
        if state is not None and (not log.exists() or log.stat().st_size < state["metrics_bytes"]):
            raise CheckpointError(
                f"{log} lacks lines that were there at the checkpoint; expected those of {state['update']} updates: "
                f"put the file back, or set out=... for a new run"
            )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "config.yaml").write_text(dump_config(self.config), encoding="utf-8")
            (self.out / "graph.mermaid").write_text(
                self.pipeline.graph.get_graph(xray=True).draw_mermaid(), encoding="utf-8"
            )
            with log.open("ab") as f:  # lines after the checkpoint are written again
                f.truncate(0 if state is None else state["metrics_bytes"])
        except OSError as e:
            raise StorageError(
                f"{self.out} cannot be written ({e}); expected a writable folder: set out=... to another"
            ) from e
        return state

    def _save(self, stage: str, update: int, learner: Learner | None, progress: Mapping[str, Any]) -> None:
        heads = self.pipeline.llm.heads
        names = [*self.own_heads, CRITIC, *(f"{h}@warm" for h in self.own_heads)]
        checkpoint.save(
            self.out / "checkpoint",
            {
                "identity": self._identity,
                "stage": stage,
                "update": update,
                "heads": {n: heads.state(n) for n in names if n in heads.names},
                "learner": learner.state() if learner else None,
                "progress": dict(progress),
                "metrics_bytes": (self.out / "metrics.jsonl").stat().st_size,
            },
        )

    def _log(self, name: str, record: Mapping[str, Any]) -> None:
        try:
            with (self.out / name).open("a", encoding="utf-8") as f:
                f.write(json.dumps(record, sort_keys=True) + "\n")
                f.flush()
                os.fsync(f.fileno())
        except OSError as e:
            raise StorageError(
                f"{self.out / name} cannot be written ({e}); expected room on the disk: free some, then --resume"
            ) from e

    # the run

    def train(self) -> Result:
        """Warm start, joint updates, best checkpoint by dev F1; leave the pipeline with the best heads."""
        state = self._open()
        heads = self.pipeline.llm.heads
        progress: dict[str, Any] = {"warm": {}, "dev_f1": {}, "best": 0, "best_heads": None, "average": {}}
        progress |= {"first": {}, "rollbacks": 0}
        started = time.perf_counter()
        if state is None:
            progress["warm"] = self._warm_start()
            for h in self.own_heads:
                heads.copy(h, f"{h}@warm")
        else:
            for name, tensors in state["heads"].items():
                if name not in heads.names:
                    heads.copy(name.removesuffix("@warm"), name)
                heads.set_state(name, tensors)
            progress = state["progress"]
        learner = Learner(self.pipeline, self.config, self.rewards, self.algorithm)
        first = 0
        if state is None:
            self._clock("warm_start", started)
            self._warm_up(learner)
            progress["best_dev"] = self._dev()
            progress["dev_f1"][0] = progress["best_dev"][0]
            progress["best_heads"] = {h: heads.state(h) for h in self.own_heads}
            self.say(f"warm start: dev F1 {progress['dev_f1'][0]:.3f}")
            self._save("joint", 0, learner, progress)
        else:
            learner.set_state(state["learner"])
            first = state["update"]
        self.after_warm_start(progress["warm"])
        for update in range(first + 1, self.config.marl.updates + 1):
            self._update(learner, update, progress)
        for h, tensors in (progress["best_heads"] or {}).items():
            heads.set_state(h, tensors)
        heads.check_trunk()
        save_heads(self.pipeline, self.out / "heads")
        self.pipeline.modes = {n: m for n, m in self.modes.items() if m not in ("learn", "frozen")}
        LIVE[str(self.out.resolve())] = self.pipeline
        write_json_atomic(self.out / "training.json", {k: progress[k] for k in ("warm", "dev_f1", "best")})
        metrics = [json.loads(x) for x in (self.out / "metrics.jsonl").read_text().splitlines()]
        return Result(self.out, progress["warm"], progress["dev_f1"], progress["best"], metrics)

    def _warm_start(self) -> dict[str, Any]:
        w = self.config.warm_start
        if w.run is not None:
            return self._given_start(Path(w.run))
        if w.steps == 0:
            return {"form": "question" if w.forms == "auto" else w.forms, "dev_f1": {}, "labels": {}}
        modes = {n: m for n, m in self.modes.items() if m not in ("learn", "frozen", "warm")}
        settings = warm_settings(self.config)
        return warm_start(self.pipeline, self.train_questions, self.dev, w.forms, settings, self.say, modes)

    def _given_start(self, run: Path) -> dict[str, Any]:
        """Take the warm heads of another run, and what it says of its label form."""
        load_heads(self.pipeline, run / "warm")
        try:
            warm: dict[str, Any] = json.loads((run / "warm.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise CheckpointError(
                f"warm_start.run: {run}/warm.json cannot be read ({e}); expected a run with a warm start: name another"
            ) from e
        self.say(f"warm start of {run}, {warm.get('form')} labels")
        return warm

    def _picked(self, update: int) -> list[Question]:
        """Return this update's training questions: consecutive rows of one seeded shuffle of all of them per pass.

        Each is asked `marl.group` times in a row.
        """
        m = self.config.marl
        n, size = len(self.train_questions), m.episodes_per_update // m.group
        first = (update - 1) * size
        rows: list[int] = []
        for turn in range(first // n, (first + size - 1) // n + 1):
            shuffled = self.rows.shuffle(seed=stable_seed(self.config.seed, "order", turn) % 2**32)["row"]
            rows += list(shuffled)[max(0, first - turn * n) : first + size - turn * n]
        return [self.train_questions[row] for row in rows for _ in range(m.group)]

    def _rollout(self, update: int, seed: int, spare: tuple[float, int] = (0.0, 0)) -> list[Episode]:
        """Run this update's training questions, sampled."""
        picked = self._picked(update)
        seeds = [stable_seed(seed, i, q.id) for i, q in enumerate(picked)]
        return self.pipeline.run(
            picked, modes=self.modes, sample=True, seeds=seeds, concurrency=len(picked), spare=spare
        )

    def _warm_up(self, learner: Learner) -> None:
        """Fit the critic on warm-start episodes before the first update."""
        m = self.config.marl
        if not m.critic.warm_up or not m.updates:
            return
        self.pipeline.llm.forget()
        seed = stable_seed(self.config.seed, "warm_up")
        episodes = self._rollout(1, seed)
        episodes = [e for e in episodes if not e.error]
        if learner.budget:
            learner.budget.begin(episodes)
        learner.score(episodes, 0)
        log = learner.fit_critic(episodes, m.critic.warm_up, seed % 2**31)
        self.say(f"critic warm-up: loss {log['loss']:.3f}")

    def _dev(self) -> tuple[float, float]:
        """Return F1 and searches of the greedy pipeline on the dev questions."""
        self.pipeline.llm.forget()
        episodes = self.pipeline.run(self.dev, modes={n: m for n, m in self.modes.items() if m != "learn"})
        self.pipeline.llm.forget()
        return f1_of(episodes), sum(e.searches for e in episodes) / len(episodes)

    def _rank(self, score: float, searches: float) -> tuple[bool, float]:
        """Return what the best heads are chosen by: F1; under a budget first that it is kept, else by how little."""
        budget = self.config.marl.budget
        kept = budget is None or searches <= SLACK * budget.searches
        return kept, score if kept else -searches

    def _choose(self, update: int, progress: dict[str, Any]) -> float:
        """Measure the running means of the heads on dev, keep them where they are the best so far; return F1.

        Means lag behind what a budget asks for: where they exceed it the heads themselves are measured too, and the
        better of both counts.
        """
        heads, budget = self.pipeline.llm.heads, self.config.marl.budget
        last = {h: heads.state(h) for h in progress["average"]}
        for h, tensors in progress["average"].items():
            heads.set_state(h, tensors)
        scores = [self._keep_best(update, progress)]
        for h, tensors in last.items():
            heads.set_state(h, tensors)
        if budget and last and not self._rank(*scores[0])[0]:
            scores.append(self._keep_best(update, progress))
        return max(scores, key=lambda score: self._rank(*score))[0]

    def _keep_best(self, update: int, progress: dict[str, Any]) -> tuple[float, float]:
        score = self._dev()
        if self._rank(*score) > self._rank(*progress["best_dev"]):
            progress["best"], progress["best_dev"] = update, score
            progress["best_heads"] = {h: self.pipeline.llm.heads.state(h) for h in self.own_heads}
        return score

    def _update(self, learner: Learner, update: int, progress: dict[str, Any]) -> None:
        m = self.config.marl
        clock = time.perf_counter()
        self.pipeline.llm.forget()  # what is cached never depends on where a run was resumed
        seed = stable_seed(self.config.seed, "update", update)
        episodes = self._rollout(update, seed, learner.spare)
        rollout_s = time.perf_counter() - clock
        failed = [e.error for e in episodes if e.error]
        if failed:
            self.say(f"update {update}: {len(failed)} of {len(episodes)} episodes failed, the first with {failed[0]}")
        learner.score(episodes, (update - 1) * m.episodes_per_update)
        rate = 1.0 - (1.0 - m.final_rate) * (update - 1) / max(1, m.updates - 1)
        diverged = ""
        finished = [e for e in episodes if not e.error]  # a crash teaches none
        try:
            log = learner.update(finished, seed % 2**31, rate, update)
        except DivergedError as e:
            if progress["rollbacks"] >= m.rollback:
                raise
            log, diverged = {"agents": {}, "diverged": str(e)}, e.head
        if learner.budget:
            log["budget"] = learner.budget.observe(finished)
        self._average(learner, progress)
        update_s = time.perf_counter() - clock - rollout_s
        own = [e for e in episodes if not e.spared] or episodes
        record: dict[str, Any] = {
            "update": update,
            "episodes": update * m.episodes_per_update,
            "train_f1": f1_of(own),
            "team_reward": sum(sum(e.team.values()) for e in own) / len(own),
            "searches": sum(e.searches for e in own) / len(own),
            "errors": sum(bool(e.error) for e in episodes),
            "failed": sum(bool(d.failed) for e in episodes for d in e.decisions),
            "rate": rate,
            **log,
        }
        if update % self.config.eval.every == 0 or update == m.updates or learner.budget:
            record["dev_f1"] = progress["dev_f1"][update] = self._choose(update, progress)
        self._check_health(learner, record, diverged, progress)
        self._log("metrics.jsonl", record)
        self._save("joint", update, learner, progress)
        self._log(
            "timing.jsonl",
            {"update": update, "rollout_s": rollout_s, "update_s": update_s, "total_s": time.perf_counter() - clock},
        )
        self.on_update(record)

    def _check_health(self, learner: Learner, record: dict[str, Any], diverged: str, progress: dict[str, Any]) -> None:
        """Log and say what is wrong; where it is severe go back to the best heads, with the rates to blame lowered."""
        m, update, heads = self.config.marl, record["update"], self.pipeline.llm.heads
        for name, figures in record["agents"].items():  # the first figure an agent had is what it is held against
            if figures["decisions"]:
                known = progress["first"].setdefault(name, {})
                progress["first"][name] = {**figures, **known}
        best = progress["dev_f1"][progress["best"]]
        found = symptoms(record, progress["first"], learner.settings, m.grad_norm, best)
        record["warnings"] = [str(s) for s in found]
        for s in found:
            self.say(f"update {update}: {s}")
        blamed = [self.pipeline.head_of[s.agent] for s in found if s.severe]
        slower = list(dict.fromkeys([*blamed, *([diverged] if diverged else [])]))
        if not slower or progress["rollbacks"] >= m.rollback:
            return
        progress["rollbacks"] += 1
        for h, tensors in progress["best_heads"].items():
            heads.set_state(h, tensors)
        progress["average"] = {h: progress["best_heads"][h] for h in progress["average"]}
        learner.start_over(slower)
        record["rolled_back"] = {"to": progress["best"], "heads": slower}
        told = " and ".join(slower)
        self.say(f"update {update}: back to the heads of update {progress['best']}, {told} at a tenth of the rate")

    def _average(self, learner: Learner, progress: dict[str, Any]) -> None:
        """Move the running means of the learning heads: updates on sampled episodes scatter around what they learn.

        Polyak & Juditsky 1992. The warm heads are the first term; rollouts and updates go on from the last heads.
        """
        decay, heads = self.config.marl.average, self.pipeline.llm.heads
        if not decay:
            return
        for h in [h for h in self.own_heads if h in learner.optimizers]:
            old, new = progress["average"].get(h) or heads.state(f"{h}@warm"), heads.state(h)
            progress["average"][h] = {k: decay * old[k] + (1.0 - decay) * new[k] for k in new}

    def _clock(self, what: str, since: float) -> None:
        self._log("timing.jsonl", {"what": what, "seconds": time.perf_counter() - since})


def save_heads(pipeline: Pipeline, folder: Path, suffix: str = "") -> None:
    """Write heads so that plain `PeftModel.from_pretrained` loads them; late ones name their role marker."""
    template = pipeline.llm.template
    folder.mkdir(parents=True, exist_ok=True)  # a graph in which nobody learns has heads too: none
    for head in dict.fromkeys(pipeline.head_of.values()):
        markers = {a: template.suffix(a, pipeline.instructions[a]) for a in pipeline.acting_by(head)}
        try:
            pipeline.llm.heads.save(head + suffix, folder / head, pipeline.fingerprint_of(head), markers)
        except (OSError, SafetensorError) as e:  # a full disk is the second
            raise StorageError(f"{folder / head} cannot be written ({e}); expected a writable folder with room") from e


def load_heads(pipeline: Pipeline, folder: Path, suffix: str = "") -> None:
    """Read every head from a run's folder; `suffix` "@warm" reads them into frozen copies."""
    for head in dict.fromkeys(pipeline.head_of.values()):
        name = head + suffix
        if suffix and name not in pipeline.llm.heads.names:
            pipeline.llm.heads.copy(head, name)
        pipeline.llm.heads.load(name, folder / head, pipeline.fingerprint_of(head))


__all__ = ["Result", "Trainer", "load_heads", "load_questions", "save_heads", "warm_settings"]

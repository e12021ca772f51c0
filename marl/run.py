"""Run: from a config to a run folder: data, index, pipeline, warm start, joint training, evaluation, report.

The comparisons that need no joint heads (`sft_more` and the warm, trunk and oracle variants) are trained and evaluated
by a second process beside joint training (`python -m jointrag.marl.baselines RUN`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jointrag.agents.labels import WARM_FORMS
from jointrag.configs.load import load_config, load_run
from jointrag.configs.schema import Config, Swap
from jointrag.data.errors import CheckpointError, ConfigError, DataError, HeadError, JointragError, StorageError
from jointrag.data.files import read_corpus, read_questions
from jointrag.data.types import Passage, Question
from jointrag.data.world import build as build_world
from jointrag.eval.evaluation import (
    Row,
    read_rows,
    run_variant,
    run_variants,
    summarise,
    variant_modes,
    write_json_atomic,
    write_rows,
)
from jointrag.eval.report import write_episodes, write_report
from jointrag.graph.declare import Declared, declare_config
from jointrag.graph.pipeline import Pipeline
from jointrag.marl.trainer import LIVE, Result, Trainer, load_heads, save_heads, split_dev, warm_settings
from jointrag.marl.warm_start import continue_supervision
from jointrag.retrieval.base import Index
from jointrag.retrieval.build import build_index, load_index
from jointrag.retrieval.cache import CachedIndex

Say = Callable[[str], None]
EPISODES = 20  # example episodes kept for the report


@dataclass(frozen=True)
class Splits:
    """Corpus and question sets of a run. `held_out_bank`: the test world in unseen wordings, where there is one."""

    passages: list[Passage]
    train: list[Question]
    dev: list[Question]
    test: list[Question]
    held_out_bank: list[Question]


@dataclass(frozen=True)
class Job:
    """A config made real."""

    config: Config
    declared: Declared
    pipeline: Pipeline
    data: Splits


def load_data(config: Config) -> Splits:
    """Generate the world, or read the files; gold ids must exist in the corpus."""
    if config.data.world is not None:
        world = build_world(config.data.world)
        return Splits(world.passages, world.train, world.dev, world.test, world.held_out_bank)
    if config.data.corpus is None:
        raise ConfigError("data: got neither a world nor a corpus; expected data.world or data.corpus: add one")
    passages = read_corpus(config.data.corpus)
    ids = {p.id for p in passages}

    def read(path: str | None) -> list[Question]:
        return [] if path is None else read_questions(path, ids)

    return Splits(passages, read(config.data.train), read(config.data.dev), read(config.data.test), [])


def open_index(config: Config, passages: Sequence[Passage], folder: Path | None, say: Say = lambda _: None) -> Index:
    """Load the index from `folder` if it is this corpus's, else build it (and save it there)."""
    settings = {"type": "bm25", **config.index}
    if folder is not None and saved_index(folder):
        try:
            return CachedIndex(load_index(folder, passages, settings))
        except ValueError:
            say(f"index: {folder} is of another corpus or setting; building it anew")
    clock = time.perf_counter()
    index = build_index(settings, passages)
    if folder is not None:
        index.save(folder)
    say(f"index: {len(passages)} passages, {settings['type']}, {time.perf_counter() - clock:.1f} s")
    return CachedIndex(index)


def saved_index(folder: Path) -> Path | None:
    """Return `folder` where an index lies in it: reading a run loads one or builds one, and writes nothing."""
    return folder if (folder / "manifest.json").exists() else None


def make_pipeline(config: Config, declared: Declared, index: Index) -> Pipeline:
    """Return the pipeline a config declares."""
    return Pipeline(
        declared.graph,
        declared.agents,
        llm=config.llm.model,
        index=index,
        heads=config.llm.heads,
        activation=config.llm.activation,
        lora={"r": config.llm.lora.r, "alpha": config.llm.lora.alpha},
        max_hops=config.graph.max_hops,
        max_context=config.llm.max_context,
        max_batch=config.llm.max_batch,
        dtype=config.llm.dtype,
        seed=config.seed,
        evidence_written=declared.evidence_written,
        recursion_limit=declared.recursion_limit,
    )


def prepare(config: Config, index_folder: Path | None = None, say: Say = lambda _: None) -> Job:
    """Check and build everything a run needs, before anything is spent."""
    declared = declare_config(config)
    data = load_data(config)
    pipeline = make_pipeline(config, declared, open_index(config, data.passages, index_folder, say))
    load_swaps(config, pipeline)
    return Job(config, declared, pipeline, data)


def load_swaps(config: Config, pipeline: Pipeline) -> None:
    """Read the heads that stand in for agents' own."""
    for name, agent in config.agents.items():
        if isinstance(agent.mode, Swap):
            swap(pipeline, name, agent.mode.swap)


def swap(pipeline: Pipeline, name: str, folder: str) -> None:
    """Read the head that acts for an agent in mode `swap`."""
    head = pipeline.head_of.get(name)
    if head is None:
        raise ConfigError(
            f"agents.{name}.mode: got a head to swap in for {name!r}, which is a tool without one; expected an agent "
            f"that can learn: remove `trainable: false`, or the mode"
        )
    pipeline.llm.heads.copy(head, f"{name}@swap")
    try:
        pipeline.llm.heads.load(f"{name}@swap", Path(folder), pipeline.fingerprint_of(head))
    except HeadError as e:
        raise HeadError(f"agents.{name}.mode.swap: {e}") from e


def fixed_modes(config: Config) -> dict[str, str]:
    """Return the modes a config holds agents in."""
    return {n: a.mode_name for n, a in config.agents.items() if a.mode_name != "learn"}


def load(folder: str | Path, pipeline: Pipeline | None = None) -> Pipeline:
    """Load a trained run, ready to answer.

    A run trained from Python holds no graph: `pipeline` is one built as it was for training (in the program that
    trained it, it is known). Returned with the run's heads.
    """
    folder = Path(folder)
    if pipeline is None and not load_config(folder, need_data=False).data.given:
        pipeline = LIVE.get(str(folder.resolve()))
    if pipeline is None:
        return load_job(folder).pipeline
    load_heads(pipeline, folder / "heads")
    return pipeline


def load_job(folder: Path) -> Job:
    """Load a trained run with its data; the warm heads too, where they were kept."""
    return open_run(folder, load_run(folder))


def load_trained(
    folder: Path, pipeline: Pipeline | None = None, questions: Sequence[Question] = ()
) -> tuple[Pipeline, Config, list[Question]]:
    """Load what a run is measured with: pipeline, config, questions (by default those it reports on).

    pipeline, questions: for a run trained from Python, which holds neither.
    """
    config = load_run(folder, need_data=pipeline is None)
    if pipeline is None:
        job = open_run(folder, config)
        return job.pipeline, config, list(questions) or test_questions(job)
    if not questions:
        raise DataError(f"{folder}: got a pipeline and no questions to ask it; expected some: questions=...")
    load_swaps(config, pipeline)
    load_run_heads(folder, config, pipeline)
    return pipeline, config, list(questions)


def open_run(folder: Path, config: Config, own_index: bool = True, say: Say = lambda _: None) -> Job:
    """Load a trained run under `config`; `own_index`: corpus and index settings are the run's, so its index serves."""
    if not (folder / "heads").is_dir():
        raise CheckpointError(
            f"{folder}: got a run without heads, expected a finished training; "
            f"go on with `jointrag train {folder} --resume`"
        )
    job = prepare(config, saved_index(folder / "index") if own_index else None, say)
    load_run_heads(folder, config, job.pipeline)
    return job


def load_run_heads(folder: Path, config: Config, pipeline: Pipeline) -> None:
    """Load a run's heads into a pipeline, the warm ones where they were kept, and set the modes it holds agents in."""
    pipeline.modes = {n: m for n, m in fixed_modes(config).items() if m != "frozen"}
    load_heads(pipeline, folder / "heads")
    if (folder / "warm").is_dir():
        load_heads(pipeline, folder / "warm", "@warm")


def warm_form(folder: Path) -> str:
    """Return the label form the warm start used."""
    file = folder / "warm.json"
    try:
        if file.exists():
            form = json.loads(file.read_text())["form"]
        else:  # a run trained from Python
            file = folder / "training.json"
            form = json.loads(file.read_text())["warm"]["form"]
        if form not in WARM_FORMS:
            raise ValueError(f"got the label form {form!r}, expected one of {', '.join(WARM_FORMS)}")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(
            f"{file} cannot be read ({e}); expected what the warm start wrote: put the file back"
        ) from e
    return str(form)


BASELINES = ("vanilla", "trunk", "before", "oracle")


def baselines(folder: Path) -> None:
    """Train `sft_more` and evaluate everything that needs no joint heads; done once."""
    target = folder / "baselines.jsonl"
    if target.exists():
        return
    config = load_run(folder)
    job = prepare(config, folder / "index")
    questions = test_questions(job)
    load_heads(job.pipeline, folder / "warm")
    load_heads(job.pipeline, folder / "warm", "@warm")
    fixed = fixed_modes(config)
    modes = variant_modes(job.pipeline.agents, fixed)
    bank = bank_questions(job)
    rows = run_variants(job.pipeline, questions, warm_form(folder), fixed, only=wanted(config, BASELINES))
    if bank:
        rows["bank_before"] = run_variant(job.pipeline, "bank_before", bank, modes["before"])
    if wanted(config, ["sft_more"]):
        if config.sft_more.steps and job.data.train and config.warm_start.steps:
            steps, settings = config.sft_more.steps, warm_settings(config)
            train, _ = split_dev(job.data.train, job.data.dev)
            learning = [a.name for a in job.pipeline.agents if config.agent(a.name).mode_name == "learn"]
            continue_supervision(job.pipeline, train, warm_form(folder), steps, settings, learning)
            save_heads(job.pipeline, folder / "sft_more")
        rows["sft_more"] = run_variant(job.pipeline, "sft_more", questions, modes["after"])
    write_rows(target, rows)


def wanted(config: Config, names: Sequence[str]) -> list[str]:
    """Return those of `names` that `eval.variants` asks for."""
    return [n for n in names if not config.eval.variants or n in config.eval.variants]


def compares(config: Config) -> bool:
    """True where a variant is asked for that the second process measures."""
    return bool(wanted(config, [*BASELINES, "sft_more"]))


def test_questions(job: Job) -> list[Question]:
    """Return the held-out questions a run reports on."""
    questions = job.data.test[: job.config.eval.test_questions]
    if not questions:
        raise DataError("data.test: got no held-out questions; expected some to report on: add data.test")
    return questions


def bank_questions(job: Job) -> list[Question]:
    """Return the held-out questions in unseen wordings, [] where `before` and `after` are not both asked for."""
    both = len(wanted(job.config, ["before", "after"])) == 2
    return job.data.held_out_bank[: job.config.eval.test_questions] if both else []


class Baselines:
    """The second process, and its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it beside this process, on one thread."""
        if (self.folder / "baselines.jsonl").exists():
            return
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with (self.folder / "baselines.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jointrag.marl.baselines", str(self.folder)], stdout=log, stderr=log, env=env
            )

    def finish(self) -> dict[str, list[Row]]:
        """Wait for it; return its rows. Where it was killed its work is done here."""
        if self._process is not None and self._process.wait() != 0:
            tail = (self.folder / "baselines.log").read_text(errors="replace").strip().splitlines()[-1:]
            if self._process.returncode == 2:
                raise JointragError("the baselines failed: " + " ".join(tail))
        if not (self.folder / "baselines.jsonl").exists():
            baselines(self.folder)
        return read_rows(self.folder / "baselines.jsonl")

    def stop(self) -> None:
        """End it."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def train_config(
    config: Config,
    *,
    resume: bool = False,
    say: Say = lambda _: None,
    on_update: Callable[[Mapping[str, Any]], None] = lambda _: None,
    on_eval: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Do a whole run: train, evaluate every block of eval.json, write the report; return the summary."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise StorageError(f"{out} cannot be made ({e}); expected a writable place: set out=... to another") from e
    job = prepare(config, out / "index", say)
    if not job.data.train:
        raise DataError("data.train: got no training questions; expected some: add data.train")
    side = Baselines(out)

    def after_warm_start(warm: Mapping[str, Any]) -> None:
        save_heads(job.pipeline, out / "warm", "@warm")
        write_json_atomic(out / "warm.json", dict(warm))
        if job.data.test and compares(config):
            side.start()

    trainer = Trainer(
        job.pipeline, job.data.train, job.data.dev or None, config=config, resume=resume, say=say, on_update=on_update,
        after_warm_start=after_warm_start,
    )  # fmt: skip
    try:
        result = trainer.train()
        if not job.data.test:
            say("no data.test: nothing is reported on held-out questions")
            write_report(out)
            return {}
        return finish(job, result, side, say, on_eval)
    except BaseException:
        side.stop()
        raise


def finish(
    job: Job, result: Result, side: Baselines, say: Say, on_eval: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Evaluate the trained pipeline beside its baselines; write eval.json, rows, episodes and report."""
    config, out = job.config, result.out
    questions = test_questions(job)
    form = str(result.warm.get("form", "question"))
    fixed = fixed_modes(config)
    modes = variant_modes(job.pipeline.agents, fixed)
    clock = time.perf_counter()
    rows = run_variants(
        job.pipeline, questions, form, fixed, only=wanted(config, [n for n in modes if n not in BASELINES]),
        progress=lambda name, done: on_eval(name, done, len(questions)),
    )  # fmt: skip
    if compares(config):
        bank = bank_questions(job)
        if bank:
            rows["bank_after"] = run_variant(job.pipeline, "bank_after", bank, modes["after"])
        rows |= side.finish()
    banks = {name: rows.pop(f"bank_{name}") for name in ("before", "after") if f"bank_{name}" in rows}
    summary = summarise(rows, config.seed, config.eval.bootstrap)
    if banks:
        summary["held_out_bank"] = summarise(banks, config.seed, config.eval.bootstrap)
    write_rows(out / "eval.rows.jsonl", rows)
    write_json_atomic(out / "eval.json", summary)
    before, after = (job.pipeline.run(questions[:EPISODES], modes=modes[name]) for name in ("before", "after"))
    write_episodes(out, before, after, EPISODES)
    with (out / "timing.jsonl").open("a", encoding="utf-8") as f:
        f.write(json.dumps({"what": "evaluation", "seconds": time.perf_counter() - clock}) + "\n")
    write_report(out)
    say(f"report: {out / 'report.html'}")
    return summary

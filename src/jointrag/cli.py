"""The command line. Each command returns one JSON document and the text people read; `main` prints one of them.

Exit codes: 0 done; 2 the user must change something; 130 interrupted, state saved; 1 a defect of ours. Everything but
the result goes to stderr. Nothing heavy is imported before a command is known: `--help` costs no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jointrag import __version__
from jointrag.data.errors import CheckpointError, ConfigError, DataError, JointragError, StorageError

if TYPE_CHECKING:
    from jointrag.configs.schema import Config

Document = dict[str, Any]
Outcome = tuple[Document, str]  # what --json prints, what people read

DONE, DEFECT, USER, INTERRUPTED = 0, 1, 2, 130
RESTARTED = "JOINTRAG_RESTARTED"  # environment: this process has been re-executed; its value says who set the threads
HEAVY = ("demo", "train", "eval", "ablate", "pareto", "credit")  # commands that compute for minutes
ALLOCATOR = {  # glibc maps and faults in every large temporary anew by default; read at process start only
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "536870912",
}
SMALL_TRUNK = 64 * 2**20  # bytes of weights up to which one thread is as fast as several
QUICK = (  # `demo --quick`: the whole line in about 90 seconds on one core; its numbers are those of a short training
    "out=runs/demo-quick",
    "data.world.passages=600",
    "data.world.train_questions=600",
    "data.world.dev_questions=60",
    "data.world.test_questions=120",
    "warm_start.steps=30",
    "warm_start.forms=title",
    "sft_more.steps=30",
    "marl.updates=5",
    "marl.episodes_per_update=64",
    "eval.questions=60",
    "eval.test_questions=120",
    "eval.bootstrap=2000",
)
WITHOUT_EFFECT = ("marl", "rewards", "warm_start", "sft_more", "out", "eval.every", "eval.questions")  # on `eval RUN`
TABLE_QUESTIONS = 300  # of `world --table` unless eval.test_questions is given: 16 passes over them
KS = (2, 5, 10)  # of `index eval`
FILES = ("config.yaml", "my_agents.py")  # templates of `init`, in configs/init/<name>.txt


# what goes to stderr


class Screen:
    """Lines and progress bars on stderr; a bar appears after two seconds. `resume` is how to go on after Ctrl-C."""

    def __init__(self) -> None:
        self.out: Path | None = None  # the run folder at stake
        self.resume = ""  # the command that goes on
        self.code = DONE  # how the command ends
        self._bar: Any = None
        self._name = ""

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(line, file=sys.stderr, flush=True)

    def count(self, name: str, done: int, total: int, numbers: str = "") -> None:
        """Show that `done` of `total` are done; another name starts another bar."""
        if not sys.stderr.isatty():  # a log: no bar, one line for each thing that says something
            if numbers:
                self.say(f"{name} {done}/{total}: {numbers}")
            return
        from tqdm import tqdm

        if self._bar is None or self._name != name:
            self.close()
            self._name = name
            self._bar = tqdm(total=total, desc=name, delay=2, leave=False, dynamic_ncols=True, initial=max(0, done - 1))
        self._bar.set_postfix_str(numbers, refresh=False)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def update(self, total: int) -> Callable[[Mapping[str, Any]], None]:
        """Return what shows the record of one joint update."""
        last = "-"

        def show(record: Mapping[str, Any]) -> None:
            nonlocal last
            if "dev_f1" in record:
                last = f"{record['dev_f1']:.3f}"
            moved = [a["kl_to_warm"] for a in record.get("agents", {}).values() if a.get("kl_to_warm") is not None]
            numbers = {
                "train F1": f"{record['train_f1']:.3f}",
                "dev F1": last,
                "reward": f"{record['team_reward']:.3f}",
                "searches": f"{record['searches']:.2f}",
                "KL": f"{round(sum(moved) / len(moved), 3) + 0.0:.3f}" if moved else "-",  # + 0.0: no "-0.000"
            }
            text = "  ".join(f"{k} {v}" for k, v in numbers.items())
            if "dev_f1" in record and sys.stderr.isatty():
                self.say(f"update {record['update']}/{total}: {text}")
            self.count("update", record["update"], total, text)

        return show


# shared pieces


def _told(differ: Mapping[str, tuple[Any, Any]], most: int = 4) -> str:
    told = [f"{key} is {there!r} there and {here!r} here" for key, (there, here) in differ.items()]
    return "; ".join(told[:most]) + (f"; and {len(told) - most} more" if len(told) > most else "")


def _started(out: Path) -> bool:
    return (out / "checkpoint" / "state.pt").exists()


def _updates_done(out: Path) -> int:
    try:
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return int(json.loads(lines[-1])["update"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 0


def _check_same(out: Path, config: Config) -> None:
    """Refuse to go on with a run of another config, before its folder is touched."""
    from jointrag.configs.load import differences, load_run

    differ = differences(load_run(out), config)
    if differ:
        raise CheckpointError(
            f"{out}: got a run of another config ({_told(differ)}), expected the same one to go on; "
            f"set out=... for a new run, or remove {out}"
        )


def _threads(config: Config) -> None:
    """Give a large trunk the cores that the restart took away; a variable the user set stays."""
    if os.environ.get(RESTARTED) != "threads":
        return
    folder = Path(config.llm.model)
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors")) if folder.is_dir() else SMALL_TRUNK + 1
    if config.llm.model != "tiny" and weights > SMALL_TRUNK:
        import torch

        torch.set_num_threads(_cores())


def _quiet() -> None:
    """Silence what third parties print while they load; errors still come through. Imports none of them."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when they are imported, here and in child processes
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging
    import warnings

    warnings.filterwarnings("ignore", module=r"(transformers|peft|trl|torch|datasets|huggingface_hub|accelerate)\b")
    for name in ("huggingface_hub", "datasets", "peft", "trl", "accelerate", "bm25s"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "transformers" in sys.modules:  # imported before: its settings are made
        from transformers.utils import logging as hf

        hf.set_verbosity_error()  # type: ignore[no-untyped-call]
        hf.disable_progress_bar()  # type: ignore[no-untyped-call]


def _train(config: Config, resume: bool, screen: Screen, again: str) -> Outcome:
    from jointrag.eval.evaluation import table
    from jointrag.marl.run import train_config

    out = screen.out = Path(config.out)
    screen.resume = again
    _threads(config)
    if resume and _started(out):
        screen.say(f"going on in {out} after update {_updates_done(out)} of {config.marl.updates}")
    elif resume:
        screen.say(f"{out} holds nothing to go on with yet: starting anew")
    if not _started(out):
        steps, m = config.warm_start.steps, config.marl
        screen.say(f"{out}: warm start of {steps} steps a head, then {m.updates} x {m.episodes_per_update} episodes")
    summary = train_config(
        config,
        resume=resume,
        say=screen.say,
        on_update=screen.update(config.marl.updates),
        on_eval=lambda name, done, total: screen.count(f"evaluating {name}", done, total),
    )
    screen.close()
    return _result(out, summary, table)


def _result(out: Path, summary: Document, table: Callable[[Mapping[str, Any]], str]) -> Outcome:
    text = table(summary) if summary else "trained; no data.test, so nothing is reported on held-out questions"
    document = {"run": str(out), "report": str(out / "report.html"), "eval": summary or None}
    return document, f"{text}\n\nreport: {out / 'report.html'}"


# commands


def demo(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Train the embedded default; go on where it stopped; show its table where it is finished."""
    from jointrag.configs.load import load_config

    config = load_config("demo", [*(QUICK if args.quick else ()), *args.rest])
    out = Path(config.out)
    started = _started(out)
    if started:
        _check_same(out, config)
        if (out / "eval.json").exists():
            from jointrag.eval.evaluation import table

            screen.say(f"{out} is finished: this is its table; remove the folder, or set out=..., to train again")
            return _result(out, _json(out / "eval.json"), table)
    words = ["jointrag", "demo", *(["--quick"] if args.quick else []), *args.rest]
    return _train(config, started, screen, shlex.join(words))


def train(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Train a config, or say what training it would do."""
    from jointrag.configs.load import load_config

    config = load_config(args.config, args.rest)
    out = Path(config.out)
    if args.dry_run:
        return plan(config, screen)
    if _started(out):
        _check_same(out, config)
        if not args.resume:
            raise CheckpointError(
                f"{out}: got a folder that holds a run, expected a new one; go on with --resume, or set out=..."
            )
    return _train(config, args.resume, screen, shlex.join(["jointrag", "train", args.config, *args.rest, "--resume"]))


def plan(config: Config, screen: Screen) -> Outcome:
    """Check everything a training needs and write nothing: config, data, graph, rewards, index settings, trunk."""
    from jointrag.configs.load import differences, load_run
    from jointrag.eval.evaluation import variant_modes
    from jointrag.graph.declare import declare_config
    from jointrag.marl.run import Splits, fixed_modes, load_data, load_swaps, make_pipeline
    from jointrag.marl.trainer import Trainer
    from jointrag.retrieval.build import build_index, index_spec

    declared = declare_config(config)
    spec = index_spec(config.index)
    data: Splits = load_data(config)
    if not data.train:
        raise DataError("data.train: got no training questions; expected some: add data.train")
    sample = data.passages[:300]  # enough to try the index's settings and to shape the retriever's head
    pipeline = make_pipeline(config, declared, build_index(config.index, sample))
    trainer = Trainer(pipeline, data.train, data.dev or None, config=config)  # agents, rewards, algorithm
    variant_modes(pipeline.agents, fixed_modes(config))
    load_swaps(config, pipeline)
    pipeline.run(trainer.train_questions[:1], modes={n: "default" for n, m in trainer.modes.items() if m == "warm"})
    heads = pipeline.llm.heads
    sizes = {h: sum(t.numel() for t in heads.state(h).values()) for h in heads.names}
    trunk = sum(p.numel() for n, p in pipeline.llm.trunk.named_parameters() if "lora" not in n)
    m, w, out = config.marl, config.warm_start, Path(config.out)
    if out.exists() and not out.is_dir():
        raise StorageError(f"out: got {out}, which is a file, expected a folder to make or go on in; name another")
    agents = {
        a.name: {
            "mode": config.agent(a.name).mode_name if a.name in pipeline.head_of else "tool",
            "head": pipeline.head_of.get(a.name),
            "parameters": sizes.get(pipeline.head_of.get(a.name, ""), 0),
        }
        for a in pipeline.agents
    }
    holds = "new"
    if _started(out):
        other = differences(load_run(out, need_data=False), config)
        holds = "holds a run of another config: set out=..." if other else "holds a run: --resume goes on"
    document: Document = {
        "agents": agents,
        "critic_parameters": sizes.get("critic", 0),
        "trunk": {"model": config.llm.model, "parameters": trunk},
        "passages": len(data.passages),
        "questions": {
            "train": len(trainer.train_questions),
            "dev": len(trainer.dev),
            "test": len(data.test[: config.eval.test_questions]),
        },
        "index": spec.model_dump(),
        "algorithm": m.algorithm,
        "updates": m.updates,
        "episodes_per_update": m.episodes_per_update,
        "episodes": m.updates * m.episodes_per_update,
        "warm_start_steps": w.steps,
        "sft_more_steps": config.sft_more.steps,
        "out": str(out),
        "out_holds_a_run": _started(out),
    }
    q = document["questions"]
    lines = [
        f"data      {len(data.passages):,} passages",
        f"questions {q['train']:,} train, {q['dev']:,} dev, {q['test']:,} test",
        f"index     {spec.type}, {spec.candidates} candidates a query",
        f"trunk     {config.llm.model}: {trunk:,} parameters, frozen; heads {config.llm.activation}",
        *(
            f"agent     {name}: {a['mode']}"
            + (f", head {a['head']} ({a['parameters']:,} parameters)" if a["head"] else "")
            for name, a in agents.items()
        ),
        f"training  warm start of {w.steps} steps a head (labels: {w.forms}), then {m.algorithm}: "
        f"{m.updates} updates x {m.episodes_per_update} episodes = {document['episodes']:,} episodes",
        f"compare   warm start continued for {config.sft_more.steps} steps",
        f"out       {out} ({holds})",
    ]
    return document, "\n".join(lines)


def evaluate(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Evaluate a trained run again, every block of eval.json; other settings go into a file of their own."""
    from jointrag.configs.load import differences, load_run
    from jointrag.eval.evaluation import (
        BANK,
        run_variant,
        run_variants,
        summarise,
        table,
        variant_modes,
        write_json_atomic,
        write_rows,
    )
    from jointrag.marl.run import (
        bank_questions,
        compares,
        fixed_modes,
        open_run,
        test_questions,
        wanted,
        warm_form,
    )
    from jointrag.marl.trainer import load_heads

    folder = Path(args.run)
    for override in args.rest:
        key = override.partition("=")[0].strip()
        if any(key == k or key.startswith(f"{k}.") for k in WITHOUT_EFFECT):
            raise ConfigError(
                f"override {override!r}: got a setting of training, expected one that an evaluation depends on, "
                f"such as eval.test_questions=200, data.test=more.jsonl or agents.filter.mode=default; remove it"
            )
    if args.world or args.index or args.data:
        return _transfer(folder, args, screen)
    own, config = load_run(folder), load_run(folder, args.rest)
    changed = {key: here for key, (_, here) in differences(own, config).items()}
    _threads(config)
    own_index = not any(k.split(".")[0] in ("data", "index") for k in changed)
    job = open_run(folder, config, own_index, screen.say)
    questions, fixed, pipeline = test_questions(job), fixed_modes(config), job.pipeline
    modes = variant_modes(pipeline.agents, fixed)
    bank = bank_questions(job)

    def show(name: str, of: int) -> Callable[[int], None]:
        return lambda done: screen.count(f"evaluating {name}", done, of)

    warm = (folder / "warm").is_dir()
    only = [n for n in wanted(config, list(modes)) if warm or "warm" not in modes[n].values()]
    form = warm_form(folder) if warm else "sub_question"
    rows = run_variants(
        pipeline, questions, form, fixed, only=only, progress=lambda name, done: show(name, len(questions))(done)
    )
    banks = {}
    if warm and compares(config):
        for name in ("before", "after") if bank else ():
            progress = show(f"{name}, held-out wordings", len(bank))
            banks[name] = run_variant(pipeline, f"bank_{name}", bank, modes[name], progress=progress)
        if wanted(config, ["sft_more"]):
            more = folder / "sft_more"
            load_heads(pipeline, more if more.is_dir() else folder / "warm")
            progress = show("sft_more", len(questions))
            rows["sft_more"] = run_variant(pipeline, "sft_more", questions, modes["after"], progress=progress)
    screen.close()
    summary = summarise(rows, config.seed, config.eval.bootstrap)
    if banks:
        summary[BANK] = summarise(banks, config.seed, config.eval.bootstrap)
    stem = "eval"
    if changed:
        summary["changed"] = [f"{key}={value}" for key, value in changed.items()]
        stem += "." + hashlib.sha256(json.dumps(changed, sort_keys=True, default=str).encode()).hexdigest()[:8]
    elif (folder / "eval.json").exists() and _json(folder / "eval.json") != json.loads(json.dumps(summary)):
        stem += ".again"
        screen.say(f"these are not the numbers of {folder / 'eval.json'}, which stays: another machine or version?")
    write_rows(folder / f"{stem}.rows.jsonl", rows)
    write_json_atomic(folder / f"{stem}.json", summary)
    document = {"run": str(folder), "file": str(folder / f"{stem}.json"), "eval": summary}
    told = "".join(f"{line}\n" for line in summary.get("changed", []))
    return document, f"{told}{table(summary)}\n\nwritten: {document['file']}"


def _transfer(folder: Path, args: argparse.Namespace, screen: Screen) -> Outcome:
    """Compare what joint training is worth under other conditions."""
    from jointrag.configs.load import load_run
    from jointrag.lab.transfer import conditions, table, transfer

    _threads(load_run(folder))
    found = transfer(folder, conditions(folder, args.world, args.index, args.data, args.rest), screen.say)
    document = {"run": str(folder), "file": str(folder / "transfer.json"), **found}
    return document, f"{table(found)}\n\nwritten: {document['file']}"


def pareto(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Sweep the search budget of a config; draw F1 against searches and tokens."""
    from jointrag.lab.pareto import sweep, table

    out = Path(args.out)
    budgets, seeds = _numbers("--budgets", args.budgets, float), _numbers("--seeds", args.seeds, int)
    workers = _cores() if args.workers is None else args.workers
    found = sweep(args.config, budgets, seeds, out, args.rest, workers, screen.say, args.runner)
    files = f"written: {out / 'pareto.json'}, {out / 'pareto.html'}"
    return {"file": str(out / "pareto.json"), **found}, f"{table(found)}\n\n{files}"


def ask(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Answer one question with a trained run, or with the shipped demo heads."""
    words = args.rest
    if len(words) > 2:
        raise ConfigError(f'got {len(words)} words, expected [RUN] and one question; put the question in quotes: "..."')
    question = words[-1]
    if len(words) == 1 and (Path(question) / "config.yaml").is_file():
        raise ConfigError(f'got the run {question} and no question; expected both: jointrag ask {question} "..."')
    if not question.strip():
        raise ConfigError("got an empty question; expected some text")
    if not question.isprintable() and "\\ud" in ascii(question):
        raise ConfigError(f"got the question {question!a}, which is not UTF-8; expected text in UTF-8")
    from jointrag.configs.load import load_run

    shipped = Path(str(resources.files("jointrag.llm"))) / "tiny" / "demo"
    folder = Path(words[0]) if len(words) == 2 else shipped
    config = load_run(folder)
    if config.data.world is not None:  # the passages do not depend on how many questions are made about them
        sets = [f"data.world.{name}_questions=1" for name in ("train", "dev", "test")]
    else:
        sets = [f"data.{name}=null" for name in ("train", "dev", "test")]
    config = load_run(folder, sets)
    from jointrag.marl.run import open_run

    job = open_run(folder, config, say=screen.say)
    state = job.pipeline.invoke(question)
    steps = [
        {"node": d.node, "hop": d.hop, "action": _plain(d.value), "update": _plain(d.update)}
        for d in state["episode"].decisions
    ]
    document = {
        "question": question,
        "answer": str(state.get("answer") or ""),
        "evidence": _plain(list(state.get("evidence") or ())),
        "steps": steps,
    }
    lines = [document["answer"] or "(no answer)", ""]
    for d in state["episode"].decisions:
        lines.append(f"  hop {d.hop}  {d.node}: {_words(d)}")
    return document, "\n".join(lines)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; a passage is its id and title."""
    if hasattr(value, "id") and hasattr(value, "title"):
        return {"id": value.id, "title": value.title}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _words(decision: Any) -> str:
    update = decision.update
    chosen = update.get("passages", update.get("evidence"))
    if chosen is not None:
        text = "; ".join(p.title for p in chosen) or "none"
    elif "pending" in update:
        text = " | ".join(map(str, update["pending"])) or "stop"
    else:
        text = str(update.get("answer", decision.value))
    return text + (" (malformed: the default)" if decision.malformed else "")


def ablate(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Say what each agent is worth: of a run by its modes, of a config or a grid by training it again."""
    from jointrag.eval.report import write_report
    from jointrag.lab.ablate import ablate_grid, ablate_run, ablate_runs, find_grid, make_grid, read_grid, table

    swaps = {}
    for given in args.swap:
        agent, found, folder = given.partition("=")
        if not found or not agent or not folder:
            raise ConfigError(f"--swap: got {given!r}, expected agent=folder/of/a/head; correct it")
        swaps[agent] = folder
    target = Path(args.target)
    arms = {name: getattr(args, name) for name in ("drop", "freeze", "only", "prompt", "drop_reward", "share")}
    where = {name: getattr(args, name) for name in ("seeds", "out", "runner", "workers")}
    if (target / "config.yaml").is_file():
        runs = [target, *(Path(word) for word in args.rest if "=" not in word)]
        said = {**arms, **{name: given for name, given in where.items() if name != "out" or len(runs) == 1}}
        wrong = next((f"--{name.replace('_', '-')}" for name, given in said.items() if given), None)
        wrong = wrong or next((word for word in args.rest if "=" in word), None)
        if wrong:
            raise ConfigError(f"got {wrong} for the run {target}, expected a config to train again; name the config")

        def say(arm: str, of: int, done: int) -> None:
            screen.count(f"evaluating {arm}", done, of)

        if len(runs) == 1:
            found, out = ablate_run(target, swaps, say), target
        else:
            out = Path(args.out or "runs/ablation-of-runs")
            found = ablate_runs(runs, out, swaps, say)
    else:
        file = find_grid(args.target)
        if file is not None:
            grid = read_grid(file)
            if any(arms.values()) or swaps or args.rest:
                raise ConfigError(f"got flags beside the grid {target}, expected them in it; write them there")
        else:
            grid = make_grid({"config": args.target, "swap": swaps, "common": args.rest, **arms}, "ablate")
        changed = {"seeds": _numbers("--seeds", args.seeds, int) if args.seeds is not None else None, "out": args.out}
        grid = make_grid(grid.model_dump() | {key: value for key, value in changed.items() if value}, "ablate")
        workers = _cores() if args.workers is None else args.workers
        found, out = ablate_grid(grid, workers, screen.say, args.runner or "local"), Path(grid.out)
    screen.close()
    write_report(out)
    files = f"written: {out / 'ablate.json'}, {out / 'report.html'}"
    return {"file": str(out / "ablate.json"), **found}, f"{table(found)}\n\n{files}"


def credit(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Say what each node of a run is worth, what it costs, and how often it harms."""
    from jointrag.eval.report import write_report
    from jointrag.lab.credit_report import report, table

    out = Path(args.run)
    found = report(out, args.rule, args.questions, screen.say)
    write_report(out)
    files = f"written: {out / 'credit.json'}, {out / 'report.html'}"
    return {"file": str(out / "credit.json"), **found}, f"{table(found)}\n\n{files}"


def lint(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Say which reward terms of a config pay for the wrong thing."""
    from dataclasses import asdict

    from jointrag.configs.load import load_config
    from jointrag.lab.lint import lint as check

    found = check(load_config(args.config, args.rest, need_data=False))
    screen.code = USER if found else DONE
    text = "\n".join([*map(str, found), f"{len(found)} to mend" if found else "nothing found"])
    return {"findings": [asdict(f) for f in found]}, text


def graph(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Draw the graph of a config."""
    from jointrag.configs.load import load_config
    from jointrag.graph.declare import declare_config

    declared = declare_config(load_config(args.config, args.rest, need_data=False))
    drawing = declared.mermaid()
    return {"mermaid": drawing, "agents": declared.names}, drawing.rstrip()


def index_build(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Write index and corpus into a folder that Pipeline(index=...) opens."""
    from jointrag.configs.load import load_config
    from jointrag.eval.evaluation import write_jsonl_atomic
    from jointrag.marl.run import load_data
    from jointrag.retrieval.build import build_index, index_spec

    config = load_config(args.config, args.rest)
    own = any(o.partition("=")[0].strip() == "out" for o in args.rest)
    folder = Path(config.out) if own else Path(config.out) / "index"
    if not own and _started(Path(config.out)):
        _check_same(Path(config.out), config)
    spec = index_spec(config.index)
    passages = load_data(config).passages
    index = build_index(config.index, passages)
    index.save(folder)
    write_jsonl_atomic(folder / "corpus.jsonl", ({"id": p.id, "title": p.title, "text": p.text} for p in passages))
    document = {"index": str(folder), "type": spec.type, "passages": len(passages), "corpus": index.fingerprint}
    return document, f"{folder}: {spec.type} index of {len(passages):,} passages"


def index_eval(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Recall of the raw question over train and dev."""
    from jointrag.configs.load import load_config
    from jointrag.marl.run import load_data, open_index, saved_index
    from jointrag.retrieval.evaluate import recall_at

    config = load_config(args.config, args.rest)
    data = load_data(config)
    questions = [*data.train, *data.dev]
    index = open_index(config, data.passages, saved_index(Path(config.out) / "index"), screen.say)
    found = recall_at(index, questions, KS)
    gold = sum(bool(q.supporting_ids) for q in questions)
    document = {"type": index.spec.type, "passages": len(index), "questions": gold}
    document |= {f"recall@{k}": v for k, v in found.items()}
    lines = [f"{gold:,} questions with gold passages (train + dev), {len(index):,} passages, {index.spec.type}"]
    return document, "\n".join([*lines, *(f"recall@{k:<3}{100 * v:6.1f}" for k, v in found.items())])


def world(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Say what the world is made of, or what each agent is worth in it."""
    from jointrag.configs.load import load_config
    from jointrag.data.world import build

    config = load_config("demo", args.rest)
    if config.data.world is None:
        raise ConfigError("data: got files, expected the built-in world; this command shows nothing else")
    data = build(config.data.world)
    if args.table:
        given = any(o.startswith("eval.test_questions") for o in args.rest)
        questions = data.test[: config.eval.test_questions if given else TABLE_QUESTIONS]
        return _world_table(config, data.passages, questions, screen)
    n = len(data.test)
    kinds: dict[str, int] = {}
    hops: dict[str, int] = {}
    for q in data.test:
        kinds[q.kind] = kinds.get(q.kind, 0) + 1
        hops[str(q.hops)] = hops.get(str(q.hops), 0) + 1
    by_id = {p.id: p for p in data.passages}
    picked: dict[str, Any] = {}
    for q in data.test:
        picked.setdefault(q.kind, q)
    order = sorted(kinds, key=lambda k: -kinds[k])
    examples = [picked[k] for k in order[:3]]
    document: Document = {
        "seed": config.data.world.seed,
        "passages": len(data.passages),
        "questions": {"train": len(data.train), "dev": len(data.dev), "test": n, "bank": len(data.held_out_bank)},
        "kinds": {k: kinds[k] / n for k in order},
        "hops": {k: hops[k] / n for k in sorted(hops)},
        "unanswerable": sum(not q.answerable for q in data.test) / n,
        "with_twin": sum(bool(q.twins) for q in data.test) / n,
        "examples": [
            {
                "question": q.question,
                "answers": list(q.answers),
                "kind": q.kind,
                "gold": [{"id": i, "title": by_id[i].title, "text": by_id[i].text} for i in q.supporting_ids],
            }
            for q in examples
        ],
    }
    lines = [
        f"{len(data.passages):,} passages in three worlds",
        f"questions     {len(data.train):,} train, {len(data.dev):,} dev, {n:,} test",
        "kinds         " + ", ".join(f"{k} {v:.0%}" for k, v in document["kinds"].items()),
        "hops          " + ", ".join(f"{k}: {v:.0%}" for k, v in document["hops"].items()),
        f"unanswerable  {document['unanswerable']:.0%}",
        f"with a twin   {document['with_twin']:.0%} of the questions have a misleading look-alike of a gold passage",
    ]
    for e in document["examples"]:
        lines += ["", f"{e['question']}", f"  answer ({e['kind']}): {', '.join(e['answers'])}"]
        lines += [f"  gold   [{g['title']}] {g['text']}" for g in e["gold"]]
    return document, "\n".join(lines)


def _world_table(config: Config, passages: Sequence[Any], questions: Sequence[Any], screen: Screen) -> Outcome:
    from jointrag.eval.combinations import combinations, combinations_table, worth
    from jointrag.graph.declare import declare_config
    from jointrag.graph.pipeline import Pipeline
    from jointrag.llm.toy import toy_model
    from jointrag.retrieval.build import build_index
    from jointrag.retrieval.cache import CachedIndex

    declared = declare_config(config)
    pipeline = Pipeline(
        declared.graph,
        declared.agents,
        llm=toy_model(),  # never asked: oracles and defaults need no language model
        index=CachedIndex(build_index(config.index, passages)),
        max_hops=config.graph.max_hops,
        evidence_written=declared.evidence_written,
        recursion_limit=declared.recursion_limit,
    )
    total = len(questions) * 2 ** len(declared.agents)
    rows = combinations(pipeline, questions, lambda done: screen.count("episodes", done, total))
    screen.close()
    document = {"questions": len(questions), "combinations": rows, "worth": worth(rows)}
    return document, f"{len(questions):,} held-out questions\n\n{combinations_table(rows)}"


def report(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Write report.html of a run anew."""
    from jointrag.configs.load import load_run
    from jointrag.eval.report import write_report

    load_run(Path(args.run), need_data=False)
    path = write_report(Path(args.run))
    return {"run": args.run, "report": str(path)}, f"report: {path}"


def init(args: argparse.Namespace, screen: Screen) -> Outcome:
    """Write a config, a plugin with an agent of one's own, and a small corpus with questions; overwrite nothing."""
    from jointrag.data.world import WorldSpec, build

    folder = Path(args.dir)
    sets = ("corpus.jsonl", "train.jsonl", "dev.jsonl", "test.jsonl")
    there = [name for name in (*FILES, *sets) if (folder / name).exists()]
    if there:
        raise StorageError(f"{folder}: got a folder that holds {', '.join(there)}, expected none of them; name another")
    data = build(WorldSpec(seed=1, passages=500, train_questions=300, dev_questions=50, test_questions=100))
    rows: dict[str, Iterable[Document]] = {
        "corpus.jsonl": ({"id": p.id, "title": p.title, "text": p.text} for p in data.passages)
    }
    for name, questions in (("train", data.train), ("dev", data.dev), ("test", data.test)):
        rows[f"{name}.jsonl"] = (
            {
                "id": q.id,
                "question": q.question,
                "answers": q.answers,
                "supporting_ids": q.supporting_ids,
                "gold_queries": q.gold_queries,
                "hops": q.hops,
                "type": q.kind,
            }
            for q in questions
        )
    templates = resources.files("jointrag.configs") / "init"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            text = (templates / f"{name}.txt").read_text(encoding="utf-8")
            _new(folder / name, text.replace("{DIR}", json.dumps(folder.as_posix(), ensure_ascii=False)[1:-1]))
        for name, lines in rows.items():
            _new(folder / name, "".join(json.dumps(line) + "\n" for line in lines))
    except OSError as e:
        raise StorageError(
            f"{folder}: got {e.strerror or e!r}, expected a folder that can be written; "
            f"correct its rights or name another"
        ) from e
    files = [str(folder / name) for name in (*FILES, *sets)]
    start = shlex.join(["jointrag", "train", str(folder / "config.yaml")])
    return {"folder": str(folder), "files": files, "next": start}, "\n".join(
        [*(f"written: {f}" for f in files), "", f"next: {start} --dry-run", f"then: {start}"]
    )


def _new(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as f:
        f.write(text)


def _json(path: Path) -> Document:
    try:
        value: Document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: got a file that cannot be read ({e}), expected JSON; remove it") from e
    return value


# the parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from jointrag.data.errors import nearest

        wrong = re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message)
        if wrong:
            message += "." + nearest(wrong[1], re.findall(r"'(.+?)'", wrong[2]))
        elif message.endswith("COMMAND"):
            message += "; jointrag --help lists them"
        self.print_usage(sys.stderr)
        self.exit(USER, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = _Parser(
        prog="jointrag",
        description="Train all agents of a LangGraph RAG pipeline together, one LoRA head each.",
        epilog="key=value sets one key of the config: marl.updates=10, agents.filter.mode=frozen, out=runs/mine",
    )
    top.add_argument("--version", action="version", version=f"jointrag {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(to: Any, name: str, run: Callable[..., Outcome], text: str, *positional: str, rest: str = "") -> _Parser:
        new: _Parser = to.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for argument in positional:
            new.add_argument(argument.lower(), metavar=argument)
        if rest:
            new.add_argument("rest", nargs="*", metavar=rest, default=[])
        new.add_argument("--json", action="store_true", help="print one JSON document on stdout")
        new.set_defaults(run_command=run, takes_rest=bool(rest))
        return new

    pairs = "key=value"
    p = add(commands, "demo", demo, "train, evaluate and report the embedded default", rest=pairs)
    p.add_argument("--quick", action="store_true", help="a small version, about 90 seconds")
    p = add(commands, "init", init, "write a config, a plugin and a small corpus to start from")
    p.add_argument("dir", nargs="?", default=".", metavar="DIR")
    p = add(commands, "train", train, "train the agents of a config together", "CONFIG", rest=pairs)
    p.add_argument("--resume", action="store_true", help="go on with the run in `out`")
    p.add_argument("--dry-run", action="store_true", help="check everything, print the plan, train nothing")
    p = add(commands, "eval", evaluate, "evaluate a trained run again, or under other conditions", "RUN", rest=pairs)
    worlds = "another world: unseen, hops, hard, or keys such as 'twins=0.8 seed=7'"
    p.add_argument("--world", action="append", default=[], metavar="WORLD", help=worlds)
    p.add_argument(
        "--index", action="append", default=[], metavar="INDEX", help="another index: a type, or '{type: ...}'"
    )
    p.add_argument("--data", action="append", default=[], metavar="CONFIG", help="the data of another config")
    p = add(commands, "ask", ask, "answer a question; without RUN by the shipped demo heads")
    p.add_argument("rest", nargs="+", metavar="[RUN] QUESTION")
    p.set_defaults(takes_rest=True)
    p = add(
        commands,
        "ablate",
        ablate,
        "say what each agent is worth, of runs or by training again",
        "TARGET",
        rest="RUN|key=value",
    )
    what = {"drop": "absent: its default action", "freeze": "kept at its warm start", "prompt": "without a head"}
    for name, text in {**what, "only": "the one that learns"}.items():
        p.add_argument(f"--{name}", action="append", default=[], metavar="AGENT", help=f"an arm with this agent {text}")
    p.add_argument("--swap", action="append", default=[], metavar="AGENT=HEAD", help="an arm with another head")
    p.add_argument("--share", action="store_true", help="an arm with one head for all agents")
    p.add_argument(
        "--drop-reward", action="append", default=[], metavar="AGENT[.TERM]", help="an arm without a process reward"
    )
    p.add_argument("--seeds", default=None, help='seeds of a retrained ablation, as in "1 2 3"')
    p.add_argument("--out", default=None, help="folder of a retrained ablation, or of the table of several runs")
    p.add_argument("--runner", default=None, metavar="local|ray", help="where trainings run")
    p.add_argument("--workers", type=int, default=None, help="trainings side by side; default: one a core")
    p = add(commands, "pareto", pareto, "sweep the search budget; F1 against searches and tokens", "CONFIG", rest=pairs)
    p.add_argument("--budgets", default="1 1.5 2", help='mean searches a question, as in "1 1.5 2"')
    p.add_argument("--seeds", default="1 2 3", help='as in "1 2 3"')
    p.add_argument("--out", default="runs/pareto", help="folder of the runs")
    p.add_argument("--runner", default="local", metavar="local|ray", help="where trainings run")
    p.add_argument("--workers", type=int, default=None, help="trainings side by side; default: one a core")
    p = add(commands, "credit", credit, "say what each node of a run is worth, and how often it harms", "RUN")
    p.add_argument("--rule", default="difference", metavar="difference|shapley", help="how the reward is divided")
    p.add_argument(
        "--questions", type=int, default=None, metavar="N", help="held-out questions; default: those of eval"
    )
    add(commands, "lint", lint, "find reward terms of a config that pay for the wrong thing", "CONFIG", rest=pairs)
    add(commands, "graph", graph, "print the graph of a config as mermaid", "CONFIG", rest=pairs)
    p = commands.add_parser("index", help="build or measure an index")
    inner = p.add_subparsers(dest="what", required=True, metavar="build|eval", parser_class=_Parser)
    add(inner, "build", index_build, "write index and corpus to out=DIR, by default <out>/index", "CONFIG", rest=pairs)
    add(inner, "eval", index_eval, "recall@2/5/10 of the raw question, train and dev", "CONFIG", rest=pairs)
    p = add(commands, "world", world, "describe the built-in world", rest=pairs)
    p.add_argument("--table", action="store_true", help="F1 of the combinations of oracle and default agents")
    add(commands, "report", report, "write report.html of a run anew", "RUN")
    return top


def _numbers(flag: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    """Return the numbers of a flag, at least one."""
    try:
        found = [kind(word) for word in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found:
        what = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f'{flag}: got {text!r}, expected {what}, as in "1 2 3"')
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse; key=value may stand before and after flags."""
    top = parser()
    args, extra = top.parse_known_args(argv)
    flags = [word for word in extra if word.startswith("-") or not args.takes_rest]
    if flags:
        from jointrag.data.errors import nearest

        known = [s for a in _options(top) for s in a]
        hint = " It goes after the command." if flags[0] in known else nearest(flags[0], known)
        top.error(f"got the unknown argument {flags[0]!r}; see `jointrag {args.command} --help`.{hint}")
    if args.takes_rest:
        args.rest = [*args.rest, *extra]
    return args


def _options(of: argparse.ArgumentParser) -> Iterator[Sequence[str]]:
    for action in of._actions:
        yield action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


# running


def _restart(argv: Sequence[str]) -> None:
    """Re-execute this process once with what torch and glibc read only at their start."""
    if not sys.platform.startswith("linux") or RESTARTED in os.environ or not argv or argv[0] not in HEAVY:
        return
    if {"-h", "--help", "--dry-run"} & set(argv):
        return
    new = {**ALLOCATOR, "OMP_WAIT_POLICY": "PASSIVE"}
    threads = not ("OMP_NUM_THREADS" in os.environ or os.path.exists("/dev/nvidiactl"))
    if threads:
        new["OMP_NUM_THREADS"] = "1"
    environment = {**new, **os.environ, RESTARTED: "threads" if threads else "yes"}
    with contextlib.suppress(OSError):  # it is a matter of speed only
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _stop(_number: int, frame: Any) -> None:
    import logging

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the questions under way are dropped without a word each
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):  # started in the background: Ctrl-C is not for this process
        raise KeyboardInterrupt
    interrupt(signal.SIGINT, frame)  # asyncio's own where a loop runs, which ends the loop in order


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does."""
    try:
        before = signal.signal(signal.SIGTERM, _stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(screen: Screen) -> str:
    if screen.out is None:
        return "interrupted"
    if _started(screen.out):
        done = _updates_done(screen.out)
        return f"interrupted: state saved in {screen.out} after update {done}; go on with: {screen.resume}"
    return "interrupted before the end of the warm start: nothing to save yet; start again with the same command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(words)
    except SystemExit as e:
        return int(e.code or 0) if isinstance(e.code, int | None) else USER
    if argv is None:
        _restart(words)
    screen = Screen()
    try:
        with _stopping(), contextlib.redirect_stdout(sys.stderr):
            _quiet()
            document, text = args.run_command(args, screen)
        print(json.dumps(document, indent=2) if args.json else text, flush=True)
        return screen.code
    except KeyboardInterrupt:
        screen.close()
        print(_interrupted(screen), file=sys.stderr)
        return INTERRUPTED
    except JointragError as e:
        screen.close()
        print(f"jointrag {args.command}: {e}", file=sys.stderr)
        return USER
    except BrokenPipeError:  # `jointrag graph ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return DONE
    except Exception as e:
        screen.close()
        told = _for_user(e)
        if told:
            print(f"jointrag {args.command}: {told}", file=sys.stderr)
            return USER
        traceback.print_exc()
        print(
            f"jointrag {args.command}: this is a defect of jointrag {__version__}, not of yours. "
            f"Please report it as an issue of the project, with the lines above, the command and the config.",
            file=sys.stderr,
        )
        return DEFECT


def _for_user(e: Exception) -> str:
    """Return what to do about an error of the machine, "" where it is ours."""
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
        where = f" at {e.filename}" if e.filename else ""
        return f"got {e.strerror!r}{where}, expected a writable place with room; free space or set out=..."
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError":
        return "got no more memory, expected enough for the batch; set llm.max_batch or llm.max_context lower"
    return ""


if __name__ == "__main__":
    sys.exit(main())

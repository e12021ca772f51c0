"""Ablation: what each agent, reward and switch is worth, at inference or by training again without it.

`jointrag ablate RUN` answers the run's held-out questions with every agent in every other mode; `jointrag ablate
CONFIG` trains a grid of arms, each its own run, over several seeds; arms that differ in nothing before joint training
share one warm start and index. Both end in the same table: each arm against the full pipeline, paired over questions
(and seeds), with bootstrap intervals, sign-flip permutation p-values and Holm's correction over the arms.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jointrag.configs.load import differences as config_differences
from jointrag.configs.load import load_config, load_run, read_yaml
from jointrag.configs.schema import Config, Swap
from jointrag.data.errors import CheckpointError, ConfigError, JointragError, nearest
from jointrag.data.types import Question
from jointrag.eval.evaluation import (
    Row,
    aligned,
    check_same_questions,
    read_rows,
    run_variant,
    small,
    write_json_atomic,
    write_rows,
)
from jointrag.eval.statistics import (
    Difference,
    Floats,
    as_json,
    bootstrap_mean,
    holm,
    paired_difference,
    paired_over_seeds,
)
from jointrag.graph.declare import declare_config
from jointrag.graph.pipeline import Pipeline
from jointrag.lab.cost import seconds_of
from jointrag.lab.runs import Run, run_all, train_command
from jointrag.marl.registry import algorithm
from jointrag.retrieval.build import index_spec
from jointrag.rewards.build import config_rewards

FULL = "full"
MODES = ("default", "trunk", "warm", "oracle")  # at inference
OWN_START = ("data", "graph", "index", "llm", "plugins", "warm_start")  # sections that change what precedes training
OWN_KEYS = ("out", "seed", "data.world.seed", "warm_start.run")  # every run has its own


# at inference


def inference_arms(
    agents: Mapping[str, bool], swaps: Mapping[str, str], warm: bool, oracles: bool, held: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return arm -> modes. agents: name -> has a head. swaps: agent -> folder of a head that is loaded already.

    warm: the run kept its warm heads. oracles: the questions have gold. held: agents the run holds in a mode.
    """
    arms: dict[str, dict[str, str]] = {FULL: {}}
    for name, has_head in agents.items():
        for mode in MODES:
            if (mode in ("trunk", "warm") and not has_head) or (mode == "warm" and not warm) or held.get(name) == mode:
                continue
            if mode == "oracle" and not oracles:
                continue
            arms[f"{name}={mode}"] = {name: mode}
        if name in swaps:
            arms[f"{name}=swap"] = {name: "swap"}
    return arms


def ablate_run(
    folder: Path, swaps: Mapping[str, str] | None = None, say: Callable[[str, int, int], None] = lambda *_: None,
    pipeline: Pipeline | None = None, questions: Sequence[Question] = (),
) -> dict[str, Any]:  # fmt: skip
    """Answer a run's held-out questions with each agent in each other mode; write and return ablate.json.

    swaps: agent -> folder of a head that stands in. say(arm, of, done) tells how far it is. pipeline, questions: for a
    run trained from Python, which holds neither.
    """
    rows, config = _answered(folder, swaps or {}, say, pipeline, questions)
    found = compare({arm: [of] for arm, of in rows.items()}, config.eval.bootstrap, config.seed)
    write_rows(folder / "ablate.rows.jsonl", rows)
    write_json_atomic(folder / "ablate.json", found)
    return found


def ablate_runs(
    folders: Sequence[Path], out: Path, swaps: Mapping[str, str] | None = None,
    say: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:  # fmt: skip
    """Do as `ablate_run` for several runs, and write into `out` and return one table of all: the runs are its seeds."""
    from jointrag.marl.run import fixed_modes

    if len({f.resolve() for f in (*folders, out)}) <= len(folders):
        raise ConfigError(
            f"got a folder twice among the runs {', '.join(map(str, folders))} and --out {out}; expected each once: "
            f"remove or rename one"
        )
    configs = [load_run(folder) for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        if (config.graph, fixed_modes(config)) != (configs[0].graph, fixed_modes(configs[0])):
            raise ConfigError(
                f"{folder}: got a run of another graph or other modes than {folders[0]}; expected the same: name others"
            )
    of_runs = []
    for folder in folders:
        ablate_run(folder, swaps, lambda arm, of, done, f=folder: say(f"{f.name} {arm}", of, done))  # type: ignore[misc]
        of_runs.append(read_rows(folder / "ablate.rows.jsonl"))
    arms = [arm for arm in of_runs[0] if all(arm in rows for rows in of_runs)]  # not all may have kept warm heads
    resamples = configs[0].eval.bootstrap
    found = compare({arm: [rows[arm] for rows in of_runs] for arm in arms}, resamples, configs[0].seed)
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "ablate.json", found)
    return found


def _answered(
    folder: Path, swaps: Mapping[str, str], say: Callable[[str, int, int], None], given: Pipeline | None,
    asked: Sequence[Question],
) -> tuple[dict[str, list[Row]], Config]:  # fmt: skip
    from jointrag.marl.run import load_trained, warm_form
    from jointrag.marl.run import swap as swap_in

    pipeline, config, questions = load_trained(folder, given, asked)
    for name, head in swaps.items():
        pipeline.agent(name)
        if pipeline.modes.get(name) == "swap":
            raise ConfigError(f"--swap: got {name!r}, which acts by a swapped head in {folder}; expected another agent")
        swap_in(pipeline, name, head)
    warm, form = (folder / "warm").is_dir(), warm_form(folder)
    agents = {a.name: a.name in pipeline.head_of for a in pipeline.agents}
    arms = inference_arms(agents, swaps, warm, any(q.supporting_ids for q in questions), pipeline.modes)
    rows = {}
    for arm, modes in arms.items():
        progress = functools.partial(say, arm, len(questions))
        rows[arm] = run_variant(pipeline, arm, questions, modes, form, progress)
    return rows, config


# trained again


class Grid(BaseModel):
    """A grid of arms: three lines of YAML, or the flags of `jointrag ablate CONFIG`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str
    seeds: list[int] = Field(default=[1, 2, 3], min_length=1)
    drop: list[str] = []  # agents absent: their default action, in training too
    freeze: list[str] = []  # agents that stay at their warm start
    only: list[str] = []  # the one agent that learns
    prompt: list[str] = []  # agents without a head
    swap: dict[str, str] = {}  # agent -> folder of another head
    share: bool = False  # all agents on one head
    drop_reward: list[str] = []  # agent.term, team.term, or agent (all its process rewards)
    arms: dict[str, list[str]] = {}  # any other arm: name -> overrides
    common: list[str] = []  # overrides of every arm, the full pipeline's too
    out: str = "runs/ablation"

    @model_validator(mode="after")
    def _own_folders(self) -> Grid:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds that differ; got {self.seeds}")
        for override in [*self.common, *(o for overrides in self.arms.values() for o in overrides)]:
            key = override.partition("=")[0].strip()
            if key in OWN_KEYS:
                raise ValueError(
                    f"no {key} among the overrides: each run has its own; set `seeds` and `out` of the grid"
                )
        return self


@dataclass(frozen=True)
class Arm:
    """One row of the table: the full config with some keys set."""

    name: str
    overrides: tuple[str, ...] = ()

    @property
    def own_start(self) -> bool:
        """True where its warm start is not that of the full pipeline."""
        keys = [o.partition("=")[0] for o in self.overrides]
        return any(k.split(".")[0].strip() in OWN_START or k.endswith(".prompt") for k in keys)


def find_grid(target: str) -> Path | None:
    """Return the file of a grid: a path, or the name of a shipped one; None where it is no grid."""
    path = Path(target)
    if path.is_file():
        return path if "config" in read_yaml(path) else None
    shipped = Path(str(resources.files("jointrag.lab"))) / "grids" / f"{target}.yaml"
    return shipped if shipped.is_file() else None


def make_grid(settings: Mapping[str, Any], where: str) -> Grid:
    """Return the grid these settings describe; `where` they come from stands before every complaint."""
    try:
        return Grid.model_validate(settings)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        told = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{where}: {key}: expected {told}; the keys are {', '.join(Grid.model_fields)}: correct it."
            f"{nearest(key, Grid.model_fields)}"
        ) from e


def read_grid(path: Path) -> Grid:
    """Read a grid from YAML; its config is relative to it, or a shipped name."""
    grid = make_grid(read_yaml(path), str(path))
    near = path.parent / grid.config
    return grid.model_copy(update={"config": str(near)}) if near.is_file() else grid


def grid_arms(grid: Grid, config: Config, agents: Sequence[str]) -> list[Arm]:
    """Return the arms of a grid, the full pipeline first; an arm that could not differ from it is refused."""

    def known(name: str, what: str) -> str:
        if name not in agents:
            raise ConfigError(f"{what}: got {name!r}, expected one of {', '.join(agents)}.{nearest(name, agents)}")
        return name

    arms = [Arm(FULL)]
    for what, names, mode in (
        ("drop", grid.drop, "default"),
        ("freeze", grid.freeze, "frozen"),
        ("prompt", grid.prompt, "trunk"),
    ):
        arms += [Arm(f"{what} {known(n, what)}", (f"agents.{n}.mode={mode}",)) for n in names]
    learning = [a for a in agents if config.agent(a).mode == "learn"]
    for n in grid.only:
        known(n, "only")
        arms.append(Arm(f"only {n}", tuple(f"agents.{a}.mode=frozen" for a in learning if a != n)))
    for n, folder in grid.swap.items():
        arms.append(Arm(f"swap {known(n, 'swap')}", (f"agents.{n}.mode={{swap: {json.dumps(folder)}}}",)))
    if grid.share:
        arms.append(Arm("one shared head", ("llm.heads=shared",)))
    arms += [Arm(f"no reward {term}", (without_reward(config, term),)) for term in grid.drop_reward]
    arms += [Arm(name, tuple(overrides)) for name, overrides in grid.arms.items()]
    folders = [arm_folder(Path(), a, 0) for a in arms]
    twice = next((a.name for a, folder in zip(arms, folders, strict=True) if folders.count(folder) > 1), None)
    if twice:
        raise ConfigError(
            f"arms: got {twice!r} twice, or a name that differs in signs alone; expected others: remove one"
        )
    if len(arms) == 1:
        raise ConfigError(
            "got no arm to compare with the full pipeline; expected some: --drop filter, --freeze rewriter, "
            "--only answerer, --drop-reward rewriter.retrieval_gain, or a grid in YAML"
        )
    return arms


def without_reward(config: Config, term: str) -> str:
    """Return the override that leaves out `agent.term`, `team.term`, or all process rewards of `agent`."""
    who, _, what = term.partition(".")
    lists = {"team": config.rewards.team, **config.rewards.process}
    if who not in lists:
        raise ConfigError(f"drop_reward: got {term!r}, expected one of {', '.join(lists)}.{nearest(who, lists)}")
    key = "rewards.team" if who == "team" else f"rewards.process.{who}"
    kinds = [str(t.get("type")) for t in lists[who]]
    if what and what not in kinds:
        raise ConfigError(
            f"drop_reward: got {term!r}, expected a term of {who}: {', '.join(kinds)}.{nearest(what, kinds)}"
        )
    kept = [t for t in lists[who] if what and t.get("type") != what]
    return f"{key}={yaml.safe_dump(kept, default_flow_style=True, width=1_000_000).strip()}"


def grid_runs(grid: Grid, config: Config, arms: Sequence[Arm]) -> list[Run]:
    """Return the runs of a grid, the full pipelines first: the others take their warm starts and indexes.

    A folder with a run of other settings is refused: its figures would be taken for those of this grid.
    """
    root, runs = Path(grid.out), []
    for arm in arms:
        for seed in grid.seeds:
            out, full = arm_folder(root, arm, seed), arm_folder(root, arms[0], seed)
            shares = arm.name != FULL and not arm.own_start and config.warm_start.steps > 0
            own = [f"seed={seed}", *([f"data.world.seed={seed}"] if config.data.world is not None else [])]
            own += ["sft_more.steps=0", "eval.variants=[after]", *grid.common, *arm.overrides]
            own += [f"warm_start.run={json.dumps(str(full))}"] if shares else []
            if (out / "config.yaml").exists():
                there = load_config(out / "config.yaml")
                differ = config_differences(there, load_config(grid.config, [*own, f"out={json.dumps(str(out))}"]))
                if differ:
                    told = "; ".join(f"{key} is {was}, here {now}" for key, (was, now) in list(differ.items())[:3])
                    raise CheckpointError(
                        f"{out}: got a run of other settings ({told}); expected those of this grid: set another `out`, "
                        f"or remove the folder"
                    )
            start = _starter(grid.config, out, own, full if shares else None)
            runs.append(Run(out, start, full / "warm.json" if shares else None))
    return runs


def _starter(config: str, out: Path, overrides: Sequence[str], full: Path | None) -> Callable[[], list[str]]:
    def command() -> list[str]:
        if full is not None and not (out / "index" / "manifest.json").exists():
            half = out / "index.half"  # renamed once whole: a run that was killed here starts this anew
            shutil.rmtree(half, ignore_errors=True)
            shutil.rmtree(out / "index", ignore_errors=True)
            shutil.copytree(full / "index", half, copy_function=_link)
            half.rename(out / "index")
        return train_command(config, out, overrides)

    return command


def _link(source: str, target: str) -> None:
    """Link where the file system can, copy where it cannot."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def arm_folder(root: Path, arm: Arm, seed: int) -> Path:
    """Return the run folder of an arm and seed."""
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in arm.name)
    return root / f"{slug}-{seed}"


def runner(name: str) -> Callable[[Sequence[Run], int], None]:
    """Return what runs trainings side by side: here, or on a Ray cluster."""
    if name == "ray":
        from jointrag.lab import ray_runner

        return ray_runner.run_all
    if name != "local":
        raise ConfigError(f"runner: got {name!r}, expected local or ray")
    return run_all


def ablate_grid(
    grid: Grid, workers: int, say: Callable[[str], None] = lambda _: None, where: str = "local"
) -> dict[str, Any]:
    """Train what is missing of a grid, here or on "ray"; write and return ablate.json of its folder."""
    run_them = runner(where)
    if workers < 1:
        raise ConfigError(f"workers: got {workers}, expected at least 1")
    config = load_config(grid.config, grid.common)
    arms = grid_arms(grid, config, declare_config(config).names)
    configs = [load_config(grid.config, [*grid.common, *arm.overrides]) for arm in arms]
    for arm, changed in zip(arms, configs, strict=True):  # every arm can be trained, before any is
        try:
            check(changed)
        except JointragError as e:
            raise type(e)(f"arm {arm.name!r}: {e}") from e
    runs = grid_runs(grid, config, arms)
    left = [run for run in runs if not run.done]
    if left:
        say(f"timing {len(arms)} arms ...")
        seconds = dict(zip([arm.name for arm in arms], seconds_of(configs), strict=True))
        by_run = [seconds[arm.name] for arm in arms for _ in grid.seeds]
        total = sum(x for run, x in zip(runs, by_run, strict=True) if not run.done)
        m = config.marl
        say(
            f"{len(arms)} arms x {len(grid.seeds)} seeds = {len(runs)} runs of {m.updates} x {m.episodes_per_update} "
            f"episodes; {len(left)} to do, {_clock(min(by_run))} to {_clock(max(by_run))} each on one core, {workers} "
            f"at a time: about {_clock(max(total / workers, max(by_run)))}"
        )
    run_them(runs, workers)
    each = len(grid.seeds)
    answered = [read_rows(run.out / "eval.rows.jsonl")["after"] for run in runs]
    rows = {arm.name: answered[n * each : (n + 1) * each] for n, arm in enumerate(arms)}
    found = compare(rows, config.eval.bootstrap)
    write_json_atomic(Path(grid.out) / "ablate.json", found)
    return found


def check(config: Config) -> None:
    """Refuse what would stop a run later: graph, rewards, algorithm, index, test set, heads to swap in."""
    declared = declare_config(config)
    config_rewards(config, declared.names, config.graph.max_hops)
    algorithm(config.marl.algorithm, config.marl.credit)
    index_spec(config.index)
    if config.data.world is None and config.data.test is None:
        raise ConfigError("data.test: got none, expected held-out questions to compare arms on: add data.test")
    for name in declared.names:
        mode = config.agent(name).mode
        if isinstance(mode, Swap) and not (Path(mode.swap) / "adapter_config.json").is_file():
            raise ConfigError(f"agents.{name}.mode.swap: got {mode.swap}, expected the folder of a head; correct it")


def _clock(seconds: float) -> str:
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


# the table


def compare(arms: Mapping[str, Sequence[Sequence[Row]]], resamples: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Return ablate.json from {arm: rows of each seed}, the full pipeline's under "full"; seeds and rows are parallel.

    `minus_full` is arm - full, with an interval over questions, and over seeds where there are several. p: two-sided
    sign flips of the questions' differences; over several seeds no smaller than what their spread allows. p_holm:
    Holm's correction over the arms.
    """
    full = arms[FULL]
    out: dict[str, Any] = {"n": sum(map(len, full)), "seeds": len(full), "rows": []}
    differences: list[Difference | None] = []
    for name, by_seed in arms.items():
        for mine, theirs in zip(by_seed, full, strict=True):
            check_same_questions({FULL: theirs, name: mine})
        every = [row for rows in by_seed for row in rows]
        row: dict[str, Any] = {
            "arm": name,
            "f1": as_json(bootstrap_mean([r["f1"] for r in every if r["f1"] is not None], resamples, seed=seed)),
            **{c: float(np.mean([r[c] for r in every])) for c in ("searches", "tokens", "llm_calls")},
        }
        found = None
        if name != FULL:
            pairs = [_f1(a) - _f1(b) for a, b in zip(by_seed, full, strict=True)]
            same = all([r["id"] for r in rows] == [r["id"] for r in full[0]] for rows in full)
            found = _difference(pairs, same, resamples, seed)
            row["minus_full"] = as_json(found)
        differences.append(found)
        out["rows"].append(row)
    corrected = iter(holm([d.p for d in differences if d]))
    for row, d in zip(out["rows"], differences, strict=True):
        if d:
            row["minus_full"]["p_holm"] = next(corrected)
    return out


def _difference(pairs: Sequence[Floats], same: bool, resamples: int, seed: int) -> Difference:
    """Return the mean of paired differences, one array a seed; `same`: all seeds asked the same questions."""
    questions = np.mean(pairs, axis=0) if same else np.concatenate(pairs)
    over_questions = paired_difference(questions, np.zeros_like(questions), resamples, seed=seed)
    if len(pairs) == 1:
        return over_questions
    over = paired_over_seeds(pairs, resamples, seed=seed, crossed=same)
    return Difference(over.mean, over.lo, over.hi, max(over.p, over_questions.p))


def table(found: Mapping[str, Any]) -> str:
    """Return ablate.json as an aligned table."""
    lines = [["arm", "F1", "95% interval", "- full", "95% interval", "p", "p (Holm)", "searches", "tokens"]]
    for row in found["rows"]:
        lo, hi = row["f1"]["interval"]
        line = [row["arm"], f"{row['f1']['mean']:.3f}", f"[{lo:.3f}, {hi:.3f}]"]
        d = row.get("minus_full")
        if d:
            lo, hi = d["interval"]
            line += [f"{d['mean']:+.3f}", f"[{lo:+.3f}, {hi:+.3f}]", small(d["p"]), small(d["p_holm"])]
        else:
            line += ["", "", "", ""]
        lines.append([*line, f"{row['searches']:.2f}", f"{row['tokens']:,.0f}"])
    seeds = f", {found['seeds']} seeds" if found["seeds"] > 1 else ""
    return "\n".join([f"{found['n']:,} questions{seeds}", "", *aligned(lines)])


def _f1(rows: Sequence[Row]) -> Floats:
    return np.array([r["f1"] for r in rows if r["f1"] is not None], dtype=float)

"""Transfer: what a run's gain is worth elsewhere: another retriever, an unseen or harder world, more hops, other sets.

Each condition changes the run's config and answers its held-out questions with the warm and the trained heads; one
table puts `after - before` of all of them beside the run's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jointrag.configs.load import load_config, load_run
from jointrag.configs.schema import Config
from jointrag.data.errors import CheckpointError, ConfigError, nearest
from jointrag.eval.evaluation import aligned, run_variant, small, summarise, variant_modes, write_json_atomic
from jointrag.marl.run import fixed_modes, open_run, test_questions
from jointrag.retrieval.build import index_spec

OWN = "own"
WORLDS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "unseen": lambda config: {"seed": _world(config).seed + 1},
    "hops": lambda config: {"seed": _world(config).seed + 1, "mix": {k: float(k == "three") for k in _mix(config)}},
    "hard": lambda config: {"seed": _world(config).seed + 1, "twins": 0.8, "name_pool": 0.2},
}


@dataclass(frozen=True)
class Condition:
    """A row of the table: what it is called, and the config it answers under."""

    name: str
    config: Config
    own_index: bool = False


def _world(config: Config) -> Any:
    if config.data.world is None:
        raise ConfigError("--world: got a run on files, expected one on a generated world; name a set with --data")
    return config.data.world


def _mix(config: Config) -> list[str]:
    return list(type(_world(config).mix).model_fields)


def conditions(
    folder: Path, worlds: Sequence[str], indexes: Sequence[str], data: Sequence[str], common: Sequence[str] = ()
) -> list[Condition]:
    """Return the run's own condition and those asked for, each checked.

    worlds: unseen | hops | hard, or keys of data.world ("twins=0.8 seed=7"). indexes: a type, or YAML such as
    "{type: dense, dim: 64}". data: configs whose `data` is taken. common: overrides of all.
    """
    own = load_run(folder, common)
    out = [Condition(OWN, own, own_index=not common)]
    for text in worlds:
        if text in WORLDS:
            changes = [f"data.world.{k}={json.dumps(v)}" for k, v in WORLDS[text](own).items()]
        elif "=" in text:
            _world(own)
            changes = [f"data.world.{pair}" for pair in text.split()]
        else:
            known = ", ".join(WORLDS)
            raise ConfigError(
                f"--world: got {text!r}, expected {known}, or keys such as twins=0.8.{nearest(text, WORLDS)}"
            )
        out.append(Condition(f"world {text}", load_run(folder, [*common, *changes])))
    for text in indexes:
        spec = text if text.lstrip().startswith("{") else f"{{type: {text}}}"
        config = load_run(folder, [*common, f"index={spec}"])
        index_spec(config.index)
        out.append(Condition(f"index {text}", config))
    for text in data:
        other = load_config(text)
        if other.data.world is None and other.data.test is None:
            raise ConfigError(f"--data: got {text} without data.test, expected held-out questions: add data.test")
        out.append(Condition(f"data {Path(text).stem}", own.model_copy(update={"data": other.data})))
    names = [c.name for c in out]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise ConfigError(f"got {twice!r} twice; expected each condition once: remove one")
    return out


def transfer(folder: Path, asked: Sequence[Condition], say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure, write and return transfer.json of a run folder."""
    if not (folder / "warm").is_dir():
        raise CheckpointError(f"{folder}: got a run without warm heads, expected them to compare with; train it anew")
    rows = []
    for condition in asked:
        say(f"{condition.name} ...")
        job = open_run(folder, condition.config, condition.own_index)
        questions = test_questions(job)
        modes = variant_modes(job.pipeline.agents, fixed_modes(condition.config))
        found = {name: run_variant(job.pipeline, name, questions, modes[name]) for name in ("before", "after")}
        summary = summarise(found, condition.config.seed, condition.config.eval.bootstrap)
        rows.append({"condition": condition.name, **summary})
    out = {"rows": rows}
    write_json_atomic(folder / "transfer.json", out)
    return out


def table(found: Mapping[str, Any]) -> str:
    """Return transfer.json as an aligned table."""
    lines = [["condition", "n", "before", "after", "after - before", "95% interval", "p", "support recall", "searches"]]
    for row in found["rows"]:
        gain = row["after_minus_before"]["f1"]
        lo, hi = gain["interval"]
        recall = row["after"]["support_recall"]["mean"]
        lines.append(
            [
                row["condition"], f"{row['n']:,}", *(f"{row[v]['f1']['mean']:.3f}" for v in ("before", "after")),
                f"{gain['mean']:+.3f}", f"[{lo:+.3f}, {hi:+.3f}]", small(gain["p"]),
                "-" if recall is None else f"{recall:.3f}", f"{row['after']['searches']['mean']:.2f}",
            ]
        )  # fmt: skip
    return "\n".join(aligned(lines))

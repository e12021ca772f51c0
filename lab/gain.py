"""`make gain SEEDS="11 12 13"`: what joint training is worth on the embedded default, on fresh seeds, with intervals.

For every seed (of world, warm start and training): the whole demo run (before, sft_more, after, ceiling, held-out
paraphrase bank) and the four single-agent trainings at equal episodes, two processes at a time. Prints the table and
exits 1 where a bar is missed. Every run resumes, so an interrupted gain goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jointrag.eval.statistics import paired_difference, paired_over_seeds, seed_interval

AGENTS = ("rewriter", "retriever", "filter", "answerer")
BARS = {
    "after - before": 0.20,
    "after - sft_more": 0.10,
    "way to the ceiling": 0.50,
    "held-out bank: after - before": 0.10,
    "after - best single agent": 0.05,
}


def command(seed: int, out: Path, only: str, overrides: Sequence[str]) -> list[str]:
    """Return the command of one run: joint (`only` empty), or one agent learning beside frozen warm ones."""
    args = [
        sys.executable,
        "-m",
        "jointrag.cli",
        "train",
        "demo",
        f"seed={seed}",
        f"data.world.seed={seed}",
        f"out={out}",
    ]
    args += [f"agents.{a}.mode=frozen" for a in AGENTS if only and a != only]
    return [*args, *(["sft_more.steps=0", "eval.variants=[after]"] if only else []), *overrides]


def run_all(jobs: Sequence[tuple[str, list[str], Path]], workers: int) -> None:
    """Run jobs `workers` at a time, each on one thread; a failed one stops everything with its last words."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    waiting = list(jobs)
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, args, out = waiting.pop(0)
            out.mkdir(parents=True, exist_ok=True)
            log = (out / "log.txt").open("ab")
            args = [*args, "--resume"] if (out / "checkpoint" / "state.pt").exists() else args
            running[name] = (subprocess.Popen(args, stdout=log, stderr=log, env=env), out)
            print(f"started {name}", file=sys.stderr, flush=True)
        time.sleep(1)
        for name, (process, out) in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            if process.returncode:
                for other, _ in running.values():
                    other.terminate()
                tail = (out / "log.txt").read_text(errors="replace").splitlines()[-5:]
                raise SystemExit(f"{name} failed with exit code {process.returncode}:\n" + "\n".join(tail))
            print(f"finished {name}", file=sys.stderr, flush=True)


def f1_of(out: Path, variant: str) -> np.ndarray[Any, Any]:
    """Return the per-question F1 of a variant of a run."""
    lines = (out / "eval.rows.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([r["f1"] for r in map(json.loads, lines) if r["variant"] == variant], dtype=float)


def report(root: Path, seeds: Sequence[int]) -> tuple[str, bool]:
    """Return the table and whether every bar is met."""
    lines = ["| seed | " + " | ".join(("before", "sft_more", "after", "ceiling", "best single", *BARS)) + " |"]
    lines.append("|" + "---|" * (6 + len(BARS)))
    ok = True
    per_seed: dict[str, list[float]] = {b: [] for b in BARS}
    over_single: list[np.ndarray[Any, Any]] = []
    singles = {a: np.mean([f1_of(root / f"{s}-only-{a}", "after").mean() for s in seeds]) for a in AGENTS}
    best = max(singles, key=lambda a: singles[a])
    for seed in seeds:
        out = root / f"{seed}"
        summary = json.loads((out / "eval.json").read_text())
        before, more, after, top = (f1_of(out, v) for v in ("before", "sft_more", "after", "ceiling"))
        single = f1_of(root / f"{seed}-only-{best}", "after")
        over_single.append(after - single)
        bank = summary["held_out_bank"]["after_minus_before"]["f1"]
        cells = []
        for name, a, b in (("after - before", after, before), ("after - sft_more", after, more)):
            d = paired_difference(a, b)
            per_seed[name].append(d.mean)
            good = d.mean >= BARS[name] and d.lo > 0
            ok &= good
            cells.append(f"{d.mean:+.3f} [{d.lo:+.3f}, {d.hi:+.3f}]{'' if good else ' MISSED'}")
        way = (after.mean() - before.mean()) / max(1e-9, top.mean() - before.mean())
        per_seed["way to the ceiling"].append(way)
        ok &= way >= BARS["way to the ceiling"]
        cells.append(f"{way:.2f}{'' if way >= BARS['way to the ceiling'] else ' MISSED'}")
        name = "held-out bank: after - before"
        per_seed[name].append(bank["mean"])
        good = bank["mean"] >= BARS[name]
        ok &= good
        cells.append(
            f"{bank['mean']:+.3f} [{bank['interval'][0]:+.3f}, {bank['interval'][1]:+.3f}]{'' if good else ' MISSED'}"
        )
        d = paired_difference(after, single)
        per_seed["after - best single agent"].append(d.mean)
        cells.append(f"{d.mean:+.3f} [{d.lo:+.3f}, {d.hi:+.3f}]")
        figures = [x.mean() for x in (before, more, after, top, single)]
        lines.append(f"| {seed} | " + " | ".join([*(f"{x:.3f}" for x in figures), *cells]) + " |")
    if len(seeds) > 1:
        for name, values in per_seed.items():
            i = seed_interval(values)
            lines.append(
                f"\n{name}: mean {i.mean:+.3f}, 95% interval over {len(seeds)} seeds [{i.lo:+.3f}, {i.hi:+.3f}]"
            )
        d = paired_over_seeds(over_single)
    else:
        d = paired_difference(over_single[0], np.zeros_like(over_single[0]))
    good = d.mean >= BARS["after - best single agent"] and d.lo > 0
    ok &= good
    lines.append("\nsingle agents, mean F1: " + ", ".join(f"{a} {x:.3f}" for a, x in singles.items()))
    lines.append(
        f"joint - only {best}, seeds and questions: {d.mean:+.3f} [{d.lo:+.3f}, {d.hi:+.3f}]{'' if good else ' MISSED'}"
    )
    return "\n".join(lines), ok


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table; 1 where a bar is missed."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", default="1 2 3", help="fresh seeds, in one string")
    p.add_argument("--out", type=Path, default=Path("runs/gain"))
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("overrides", nargs="*", help="key=value for every run")
    a = p.parse_args(argv)
    seeds = [int(s) for s in a.seeds.replace(",", " ").split()]
    jobs = []
    for seed in seeds:
        for only in ("", *AGENTS):
            out = a.out / (f"{seed}-only-{only}" if only else f"{seed}")
            if not (out / "eval.json").exists():
                jobs.append((out.name, command(seed, out, only, a.overrides), out))
    run_all(jobs, a.workers)
    text, ok = report(a.out, seeds)
    print(text)
    (a.out / "table.md").write_text(text + "\n", encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

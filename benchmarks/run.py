"""`make bench`: ratios from one run on this machine, each side at its best thread count.

1. rollouts: episodes a second, batched through the scheduler, against one question at a time through the same graph.
2. update: the late, cached update (cache filling included) against `activation: everywhere` on the same decisions, both
   in length-sorted chunks, on the demo's contexts and on contexts of 512 tokens.
3. F1 of both activations after equal episodes (`--train N` updates each; 0 leaves it out).
4. where the time of one iteration goes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from jointrag.configs.load import load_config
from jointrag.llm.types import Completion, Request
from jointrag.marl.algorithms.mappo import Mappo
from jointrag.marl.learner import Learner
from jointrag.marl.run import Job, prepare
from jointrag.marl.trainer import Trainer

THREADS = (1, 2)


def clock(work: Callable[[], Any], repeats: int = 3) -> float:
    """Return the best wall time in seconds."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def best_threads(work: Callable[[], Any], repeats: int = 2) -> tuple[float, int]:
    """Return (seconds, threads) of the best thread count."""
    results = []
    for n in THREADS:
        torch.set_num_threads(n)
        work()
        results.append((clock(work, repeats), n))
    torch.set_num_threads(1)
    return min(results)


def rollouts(job: Job, count: int) -> dict[str, Any]:
    """Compare batched rollouts with one question at a time; count decisions that differ (near-ties)."""
    questions = job.data.test[:count]
    batched, threads = best_threads(lambda: job.pipeline.run(questions), 3)
    alone, alone_threads = best_threads(lambda: [job.pipeline.run([q]) for q in questions], 1)
    together = job.pipeline.run(questions)
    single = [job.pipeline.run([q])[0] for q in questions]
    pairs = [
        (a.completion, b.completion)
        for x, y in zip(together, single, strict=True)
        for a, b in zip(x.decisions, y.decisions, strict=False)
        if a.completion and b.completion
    ]
    differing = sum(a.tokens != b.tokens for a, b in pairs)
    return {
        "batched_episodes_per_s": count / batched,
        "single_episodes_per_s": count / alone,
        "threads": [threads, alone_threads],
        "ratio": alone / batched,
        "decisions": len(pairs),
        "differing": differing / len(pairs),
    }


def lengthened(acts: Sequence[tuple[Request, Completion]], size: int) -> list[tuple[Request, Completion]]:
    """Return the decisions with contexts of exactly `size` tokens: their own, repeated."""
    return [(replace(r, context=(r.context * (size // len(r.context) + 1))[:size]), c) for r, c in acts]


def one_pass(learner: Learner, acts: Sequence[tuple[Request, Completion]], late: bool) -> None:
    """Run the PPO epochs of one update, forward and backward over decisions, filling the context cache first."""
    llm = learner.pipeline.llm
    llm.late = late
    llm.forget()
    chunks = llm.chunks(acts, size=64)
    for _ in range(learner.config.marl.epochs):
        for chunk in chunks:
            logp, entropy = llm.evaluate(chunk)
            (-logp.sum() - 0.01 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
    llm.late = True
    llm.forget()


def updates(job: Job, learner: Learner, size: int | None, count: int) -> dict[str, Any]:
    """Compare the late, cached update with the plain one on the same decisions."""
    episodes = job.pipeline.run(job.data.train[:count], sample=True)
    acts = [s.act for s in learner.samples(episodes)]
    if size is not None:
        acts = lengthened(acts, size)
    late, t1 = best_threads(lambda: one_pass(learner, acts, True), 1)
    plain, t2 = best_threads(lambda: one_pass(learner, acts, False), 1)
    mean = sum(len(r.context) for r, _ in acts) / len(acts)
    return {
        "decisions": len(acts), "mean_context": mean, "late_s": late, "everywhere_s": plain, "threads": [t1, t2],
        "ratio": plain / late,
    }  # fmt: skip


def iteration(job: Job, learner: Learner) -> dict[str, Any]:
    """Say where the time of one iteration goes."""
    config = job.config
    questions = job.data.train[: config.marl.episodes_per_update]
    parts: dict[str, float] = {}
    start = time.perf_counter()

    def part(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        out = work()
        parts[name] = time.perf_counter() - begun
        return out

    job.pipeline.llm.forget()
    episodes = part("rollout", lambda: job.pipeline.run(questions, sample=True))
    part("rewards", lambda: learner.score(episodes, 0))
    acts, where, values = part("critic values", lambda: learner.values(episodes))
    credits = part("credit", lambda: learner.credit(episodes, where, values))
    samples = part("collect", lambda: learner.samples(episodes))
    part("reference log-probs", lambda: learner.references(samples))
    part("critic update", lambda: learner._fit(acts, where, values, credits, episodes, 1, 0, 1.0))
    part("policy update", lambda: learner._policy(samples, 0, 1.0))
    wall = time.perf_counter() - start
    return {"wall_s": wall, "parts_s": parts, "accounted": sum(parts.values()) / wall}


def trained_f1(updates: int) -> dict[str, float]:
    """Return the best dev F1 of both activations after equal episodes."""
    out = {}
    for activation in ("late", "everywhere"):
        config = load_config(
            "demo", [f"llm.activation={activation}", f"marl.updates={updates}", f"eval.every={updates}"]
        )
        job = prepare(config)
        trainer = Trainer(
            job.pipeline,
            job.data.train,
            job.data.dev,
            config=config,
            out=f"runs/bench-{activation}-{updates}",
            resume=True,
        )
        out[activation] = max(trainer.train().dev_f1.values())
    return out


def main() -> int:
    """Measure, print, and exit 1 below a bar."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--episodes", type=int, default=128)
    p.add_argument("--train", type=int, default=8, help="updates for the F1 of both activations; 0 = leave out")
    a = p.parse_args()
    torch.set_num_threads(1)
    job = prepare(load_config("demo", []))
    for head in dict.fromkeys(job.pipeline.head_of.values()):
        job.pipeline.llm.heads.copy(head, f"{head}@warm")
    trainer = Trainer(job.pipeline, job.data.train, job.data.dev, config=job.config, out="runs/bench")
    learner = Learner(job.pipeline, job.config, trainer.rewards, Mappo())
    result: dict[str, Any] = {"rollouts": rollouts(job, a.episodes)}
    result["update_demo_contexts"] = updates(job, learner, None, a.episodes)
    result["update_512_contexts"] = updates(job, learner, 512, max(8, a.episodes // 8))
    result["iteration"] = iteration(job, learner)
    if a.train:
        result["f1_after_equal_episodes"] = trained_f1(a.train)
    print(json.dumps(result, indent=1))
    bars = {
        "batched rollouts >= 5x": result["rollouts"]["ratio"] >= 5,
        "same tokens but for 0.5%": result["rollouts"]["differing"] <= 0.005,
        "late update >= 3x on the demo's contexts": result["update_demo_contexts"]["ratio"] >= 3,
        "late update >= 6x at 512 tokens": result["update_512_contexts"]["ratio"] >= 6,
        "iteration accounted within 5%": result["iteration"]["accounted"] >= 0.95,
    }
    for name, good in bars.items():
        print(f"{'ok    ' if good else 'MISSED'} {name}", file=sys.stderr)
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

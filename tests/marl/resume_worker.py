"""Trains on demand: imports once, then forks one child a request, which may be killed at any moment.

stdin: "OUT RESUME" a line; stdout: the child's pid, then its exit status (negative = the signal that ended it).
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Build everything a run needs, then serve."""
    warnings.simplefilter("ignore")
    import torch

    import jointrag.marl.sft  # noqa: F401
    from jointrag.configs.load import load_config
    from jointrag.data.world import Mix, QuestionMaker, WorldSpec, generate
    from jointrag.graph.declare import declare_config
    from jointrag.graph.pipeline import Pipeline
    from jointrag.llm.toy import toy_model
    from jointrag.marl.trainer import Trainer
    from jointrag.retrieval import build_index

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # accelerate collects garbage after each training, which takes longer than the training
    world = generate(WorldSpec(passages=500), "train")
    index = build_index({"type": "bm25", "dim": 16}, world.passages)
    questions = QuestionMaker(world, (0, 1, 2), 0).make(30, Mix(), "q")
    config = load_config({"data": {"world": {}}}, sys.argv[1:])
    declared = declare_config(config)

    def train(out: Path, resume: bool) -> None:
        pipeline = Pipeline(
            declared.graph, declared.agents, toy_model(), index, max_hops=config.graph.max_hops,
            evidence_written=declared.evidence_written, recursion_limit=declared.recursion_limit,
        )  # fmt: skip
        Trainer(pipeline, questions[:24], questions[24:], config=config, out=out, resume=resume).train()

    print("ready", flush=True)
    for line in sys.stdin:
        out, resume = line.split()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                train(Path(out), resume == "resume")
                code = 0
            except BaseException as e:
                print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
            os._exit(code)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()

"""An agent of your own, declared in a graph of YAML and trained with the others: a checker that asks for one more look.

python examples/own_agent.py [TRUNK] [OUT]      a minute or two on one core; TRUNK is `tiny`, a folder or a hub name
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jointrag.agents import Agent
from jointrag.llm import FreeText, Observation


class Checker(Agent):
    """Says "again" where the evidence does not hold the answer yet; anything else goes on to the answerer."""

    name, action = "checker", FreeText(max_tokens=8)
    reads: ClassVar[tuple[str, ...]] = ("question", "evidence")
    writes: ClassVar[tuple[str, ...]] = ("verdict",)

    def observe(self, state: Mapping[str, Any]) -> Observation:
        """It sees question, evidence and trail."""
        return Observation.of(state, instruction="is the answer there? again, or done")

    def update(self, state: Mapping[str, Any], text: str) -> dict[str, Any]:
        """Write the verdict."""
        return {"verdict": "again" if text.strip() == "again" else "done"}

    def default(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Without it the first evidence is enough."""
        return {"verdict": "done"}


CONFIG = {
    "data": {"world": {"passages": 500, "train_questions": 200, "dev_questions": 40, "test_questions": 60}},
    "plugins": [str(Path(__file__).resolve())],
    "graph": {
        "state": {"verdict": {"merge": "replace"}},
        "nodes": {
            "rewriter": {"type": "rewriter"},
            "retriever": {"type": "retriever", "k": 5},
            "filter": {"type": "evidence_filter", "budget": 4},
            "checker": {"type": "own_agent.Checker"},
            "answerer": {"type": "answerer"},
        },
        "edges": {
            "START": "rewriter",
            "rewriter": {"if": "wants_search", "then": "retriever", "else": "answerer"},
            "retriever": "filter",
            "filter": "checker",
            "checker": {
                "if": {"all": [{"field_equals": {"key": "verdict", "value": "again"}}, {"hop_below": 3}]},
                "then": "rewriter",
                "else": "answerer",
            },
            "answerer": "END",
        },
    },
    "warm_start": {"steps": 20, "forms": "title"},
    "sft_more": {"steps": 20},
    "marl": {"updates": 3, "episodes_per_update": 64},
    "eval": {"every": 3, "questions": 40, "test_questions": 60, "bootstrap": 1000},
}


def main(trunk: str = "tiny", out: str = "runs/own_agent", *overrides: str) -> None:
    """Train the graph and print the table: `without_checker` is what the checker is worth."""
    from jointrag.configs.load import load_config
    from jointrag.eval.evaluation import table
    from jointrag.marl.run import train_config

    config = load_config(CONFIG, [f"llm.model={trunk}", f"out={out}", *overrides])
    print(table(train_config(config, say=print)))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    main(*sys.argv[1:])

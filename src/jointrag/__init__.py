"""jointrag trains every agent of a LangGraph RAG pipeline together and tells what each agent is worth.

The public names load on first use, so that `import jointrag` costs milliseconds and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

__all__ = ["Pipeline", "Trainer", "__version__", "evaluate", "load"]

_LAZY = {
    "Pipeline": "jointrag.graph.pipeline:Pipeline",
    "Trainer": "jointrag.marl.trainer:Trainer",
    "evaluate": "jointrag.eval.evaluation:evaluate",
    "load": "jointrag.marl.run:load",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(
            f"got jointrag.{name}, expected one of {sorted(__all__)}: a folder such as jointrag.agents "
            f"has to be imported by its name first"
        )
    module, _, attribute = _LAZY[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

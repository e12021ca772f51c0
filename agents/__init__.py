"""What decides in a graph: one file per role, its prompt files beside it."""

if not __name__.startswith("jointrag."):
    raise ImportError(
        f"got a bare import of {__name__!r}, expected 'jointrag.{__name__}': run `pip install -e .` in the clone, "
        f"set PYTHONSAFEPATH=1 or leave the clone's root, and write `import jointrag.{__name__}`"
    )

from jointrag.agents.answerer import Answerer
from jointrag.agents.base import Agent
from jointrag.agents.evidence_filter import EvidenceFilter
from jointrag.agents.retriever import Retriever
from jointrag.agents.rewriter import Rewriter

__all__ = ["Agent", "Answerer", "EvidenceFilter", "Retriever", "Rewriter"]

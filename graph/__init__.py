"""Episodes, what a running graph carries, state with its merge rules, and YAML to StateGraph."""

if not __name__.startswith("jointrag."):
    raise ImportError(
        f"got a bare import of {__name__!r}, expected 'jointrag.{__name__}': run `pip install -e .` in the clone, "
        f"set PYTHONSAFEPATH=1 or leave the clone's root, and write `import jointrag.{__name__}`"
    )

from jointrag.graph.context import RagContext
from jointrag.graph.state import RagState, wants_search

__all__ = ["RagContext", "RagState", "wants_search"]

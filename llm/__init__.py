"""One frozen trunk carries every agent: types, actions, the model, LoRA heads and the scheduler."""

if not __name__.startswith("jointrag."):
    raise ImportError(
        f"got a bare import of {__name__!r}, expected 'jointrag.{__name__}': run `pip install -e .` in the clone, "
        f"set PYTHONSAFEPATH=1 or leave the clone's root, and write `import jointrag.{__name__}`"
    )

from jointrag.llm.actions import FreeText, Queries, Ranking, Select
from jointrag.llm.types import Observation

__all__ = ["FreeText", "Observation", "Queries", "Ranking", "Select"]

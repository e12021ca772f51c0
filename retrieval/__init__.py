"""Indexes: one protocol (`Index`), and BM25, dense, hybrid and HTTP search behind it."""

from __future__ import annotations

if not __name__.startswith("jointrag."):
    raise ImportError(
        f"got a bare import of {__name__!r}, expected 'jointrag.{__name__}': run `pip install -e .` in the clone, "
        f"set PYTHONSAFEPATH=1 or leave the clone's root, and write `import jointrag.{__name__}`"
    )

from jointrag.retrieval.base import Hits, Index, IndexSpec
from jointrag.retrieval.build import build_index, index_class, index_spec, load_index
from jointrag.retrieval.cache import CachedIndex
from jointrag.retrieval.evaluate import recall_at
from jointrag.retrieval.fusion import rrf
from jointrag.retrieval.registry import register

__all__ = [
    "CachedIndex",
    "Hits",
    "Index",
    "IndexSpec",
    "build_index",
    "index_class",
    "index_spec",
    "load_index",
    "recall_at",
    "register",
    "rrf",
]

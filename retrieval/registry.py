"""Index types by name: "module:Class", imported only when built. A plugin adds its own with `register`."""

from __future__ import annotations

from jointrag.retrieval.base import Index

INDEXES: dict[str, str | type[Index]] = {
    "bm25": "jointrag.retrieval.bm25:Bm25Index",
    "dense": "jointrag.retrieval.dense:DenseIndex",
    "hybrid": "jointrag.retrieval.hybrid:HybridIndex",
    "http": "jointrag.retrieval.http:HttpIndex",
}


def register(name: str, target: str | type[Index]) -> None:
    """Make an index type known by name."""
    INDEXES[name] = target

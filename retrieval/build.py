"""From settings to an index: find the class by its type, check the settings against its Spec, build or load."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jointrag.data.errors import ConfigError, nearest
from jointrag.data.types import Passage
from jointrag.retrieval.base import Index, IndexSpec
from jointrag.retrieval.registry import INDEXES


def index_class(name: object) -> type[Index]:
    """The class of an index type."""
    if not isinstance(name, str) or name not in INDEXES:
        raise ConfigError(
            f"index.type: got {name!r}, expected one of {', '.join(INDEXES)}; correct the name."
            f"{nearest(str(name), INDEXES)}"
        )
    target = INDEXES[name]
    if isinstance(target, str):
        module, _, cls = target.partition(":")
        loaded: type[Index] = getattr(importlib.import_module(module), cls)
        return loaded
    return target


def index_spec(settings: Mapping[str, Any]) -> IndexSpec:
    """The checked settings of `index: {...}`; `type` is bm25 where it is not given."""
    settings = {"type": "bm25", **settings}
    spec: type[IndexSpec] = index_class(settings["type"]).Spec
    try:
        return spec(**settings)
    except ValidationError as error:
        raise ConfigError("; ".join(_told(e, spec) for e in error.errors())) from error


def _told(error: Any, spec: type[IndexSpec]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(spec.model_fields)
        return f"index.{key}: got an unknown key, expected one of {', '.join(known)}; remove it.{nearest(key, known)}"
    return f"index.{key}: got {error['input']!r}, expected: {error['msg']}; correct the value"


def build_index(settings: Mapping[str, Any], passages: Sequence[Passage]) -> Index:
    """Index the passages as `index: {...}` of a config says."""
    spec = index_spec(settings)
    return index_class(spec.type).build(spec, passages)


def load_index(folder: str | Path, passages: Sequence[Passage], settings: Mapping[str, Any] | None = None) -> Index:
    """Read a saved index; another corpus, other `settings` (None = any) and damaged files are refused."""
    from jointrag.retrieval.store import load_checked

    return load_checked(Path(folder), passages, None if settings is None else index_spec(settings))

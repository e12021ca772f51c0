"""Algorithms and credit rules by name: "module:Class", imported only when built."""

from __future__ import annotations

import importlib
from typing import Any

from jointrag.data.errors import ConfigError, nearest

ALGORITHMS: dict[str, str] = {
    "mappo": "jointrag.marl.algorithms.mappo:Mappo",
    "ippo": "jointrag.marl.algorithms.ippo:Ippo",
}


def algorithm(name: str) -> Any:
    """Return the algorithm called `name`."""
    if name not in ALGORITHMS:
        raise ConfigError(
            f"marl.algorithm: got {name!r}; expected one of {sorted(ALGORITHMS)}.{nearest(name, ALGORITHMS)}"
        )
    module, _, cls = ALGORITHMS[name].partition(":")
    return getattr(importlib.import_module(module), cls)()

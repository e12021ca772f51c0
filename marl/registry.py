"""Algorithms and credit rules by name: "module:Class", imported only when built."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from jointrag.data.errors import ConfigError, nearest

ALGORITHMS: dict[str, str] = {
    "mappo": "jointrag.marl.algorithms.mappo:Mappo",
    "ippo": "jointrag.marl.algorithms.ippo:Ippo",
}


CREDIT: dict[str, str] = {
    "team_gae": "jointrag.marl.credit.team_gae:team_gae",
    "shared_return": "jointrag.marl.credit.shared_return:shared_return",
    "group_relative": "jointrag.marl.credit.group_relative:group_relative",
    "difference": "jointrag.marl.credit.difference:difference",
    "shapley": "jointrag.marl.credit.shapley:shapley",
}


def _named(key: str, name: str, registry: Mapping[str, str]) -> Any:
    if name not in registry:
        raise ConfigError(f"{key}: got {name!r}; expected one of {sorted(registry)}.{nearest(name, registry)}")
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def algorithm(name: str, credit: str = "team_gae") -> Any:
    """Return the algorithm called `name`, sharing the team reward by the rule called `credit`."""
    return _named("marl.algorithm", name, ALGORITHMS)(_named("marl.credit", credit, CREDIT))

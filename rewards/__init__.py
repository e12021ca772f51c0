"""Outcome terms, process terms and guards; they read finished episodes only."""

from __future__ import annotations

if not __name__.startswith("jointrag."):
    raise ImportError(
        f"got a bare import of {__name__!r}, expected 'jointrag.{__name__}': run `pip install -e .` in the clone, "
        f"set PYTHONSAFEPATH=1 or leave the clone's root, and write `import jointrag.{__name__}`"
    )

from jointrag.rewards.base import ProcessTerm, TeamTerm
from jointrag.rewards.build import DEFAULT, RewardFunction, build_rewards
from jointrag.rewards.registry import register_process, register_team

__all__ = [
    "DEFAULT",
    "ProcessTerm",
    "RewardFunction",
    "TeamTerm",
    "build_rewards",
    "register_process",
    "register_team",
]

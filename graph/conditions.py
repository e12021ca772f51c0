"""Conditions of edges by name with parameters, never `eval`: wants_search, hop_below, field_equals, empty, all, any, ..

Written as a name (`wants_search`), as a name with parameters (`{hop_below: {n: 2}}`, or `{hop_below: 2}` where there is
one), or as a plugin's function (`my_agents.enough`), which takes the state, then its parameters, and returns a bool.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from jointrag.agents.registry import Plugins, check_arguments, resolve
from jointrag.data.errors import GraphError, nearest
from jointrag.graph import state as rag

State = Mapping[str, Any]


def wants_search(state: State) -> bool:
    """The rewriter asked; in a declared graph: and search rounds remain (`graph.max_hops`)."""
    return rag.wants_search(cast(rag.RagState, state))


def hop_below(state: State, n: int) -> bool:
    """Fewer than n search rounds so far."""
    return int(state.get("hop") or 0) < n


def field_equals(state: State, key: str, value: Any) -> bool:
    """The key holds exactly this value."""
    return bool(state.get(key) == value)


def empty(state: State, key: str) -> bool:
    """The key is not set, or holds an empty list or text."""
    value = state.get(key)
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


CONDITIONS: dict[str, Callable[..., bool]] = {
    "wants_search": wants_search,
    "hop_below": hop_below,
    "field_equals": field_equals,
    "empty": empty,
}
COMBINATIONS = ("all", "any", "not")


def register(name: str, function: Callable[..., bool]) -> None:
    """Make a condition known by name."""
    CONDITIONS[name] = function


@dataclass(frozen=True)
class Condition:
    """A compiled condition: call it with the state."""

    kind: str  # a name of CONDITIONS, a plugin function's, or all | any | not
    label: str  # for drawings
    test: Callable[[State], bool]
    parts: tuple[Condition, ...] = ()
    keys: frozenset[str] = frozenset()  # state keys it reads by parameter

    def __call__(self, state: State) -> bool:
        return self.test(state)

    def bounded(self, outcome: bool) -> bool:
        """True where `outcome` can come only a limited number of times, as long as `hop` grows in between.

        all is bounded if one part is, any if every part is, and the other way round for their being false.
        """
        if self.kind == "not":
            return self.parts[0].bounded(not outcome)
        if self.kind in ("all", "any"):
            one_is_enough = (self.kind == "all") == outcome
            bounds = [part.bounded(outcome) for part in self.parts]
            return any(bounds) if one_is_enough else all(bounds)
        return outcome and self.kind in ("wants_search", "hop_below")


def compile_condition(
    spec: Any,
    *,
    plugins: Plugins | None = None,
    keys: Collection[str] | None = None,
    max_hops: int | None = None,
    where: str = "if",
) -> Condition:
    """Compile what YAML says. `keys`: legal state keys, None = any. `max_hops` bounds wants_search, None = does not."""
    again = partial(compile_condition, plugins=plugins, keys=keys, max_hops=max_hops)
    if isinstance(spec, str):
        name, given = spec, None
    elif isinstance(spec, Mapping) and len(spec) == 1:
        name, given = next(iter(spec.items()))
    else:
        raise GraphError(
            f"{where}: got {spec!r}, expected a condition: a name such as wants_search, or one name with its "
            f"parameters such as {{hop_below: {{n: 2}}}}; combine several with all, any, not."
        )
    known = (*CONDITIONS, *COMBINATIONS)
    if name in ("all", "any"):
        if not isinstance(given, list) or not given:
            raise GraphError(f"{where}.{name}: got {given!r}, expected a list of conditions; write {{{name}: [a, b]}}.")
        parts = tuple(again(part, where=f"{where}.{name}.{i}") for i, part in enumerate(given))
        combine = all if name == "all" else any
        label = (" and " if name == "all" else " or ").join(p.label for p in parts)
        return Condition(name, label, lambda state: combine(p(state) for p in parts), parts, _keys(parts))
    if name == "not":
        if given is None:
            raise GraphError(f"{where}.not: got nothing, expected a condition; write {{not: wants_search}}.")
        part = again(given, where=f"{where}.not")
        return Condition("not", f"not {part.label}", lambda state: not part(state), (part,), part.keys)
    if not isinstance(name, str) or (name not in CONDITIONS and "." not in name):
        raise GraphError(
            f"{where}: got the unknown condition {name!r}, expected one of {', '.join(known)}, or a plugin's function "
            f"such as my_agents.enough; correct the name.{nearest(str(name), known)}"
        )
    function = CONDITIONS[name] if name in CONDITIONS else resolve(name, plugins or {}, where)
    if not callable(function) or isinstance(function, type):
        raise GraphError(f"{where}: got {name!r}, expected a function that takes the state; name one.")
    if inspect.iscoroutinefunction(function):
        raise GraphError(f"{where}: got the coroutine function {name!r}, expected a plain one; remove its `async`.")
    if given is not None and not isinstance(given, Mapping):
        parameters = list(inspect.signature(function).parameters)[1:]
        if len(parameters) != 1:
            expected = f"{{{name}: {{{', '.join(f'{p}: ..' for p in parameters)}}}}}" if parameters else name
            raise GraphError(f"{where}.{name}: got {given!r}, expected its parameters by name; write {expected}.")
        given = {parameters[0]: given}
    arguments = check_arguments(function, given or {}, f"{where}.{name}", skip=1)
    read = frozenset({arguments["key"]} if name in ("field_equals", "empty") else ())
    for key in read:
        if keys is not None and key not in keys:
            raise GraphError(
                f"{where}.{name}: got the key {key!r}, expected a state key: one of {', '.join(keys)}; correct it, or "
                f"declare it under graph.state.{nearest(key, keys)}"
            )
    label = " ".join([name, *(str(v) for v in arguments.values())])
    if name == "wants_search" and max_hops is not None:
        return Condition(name, name, lambda state: function(state) and hop_below(state, max_hops))
    if not arguments:
        return Condition(name, label, lambda state: bool(function(state)), keys=read)
    return Condition(name, label, lambda state: bool(function(state, **arguments)), keys=read)


def _keys(parts: tuple[Condition, ...]) -> frozenset[str]:
    return frozenset().union(*(p.keys for p in parts))


__all__ = [
    "CONDITIONS",
    "Condition",
    "compile_condition",
    "empty",
    "field_equals",
    "hop_below",
    "register",
    "wants_search",
]

"""declare: nodes and edges of a config become an ordinary StateGraph, checked before anything runs.

Edges: a target, [parallel targets], {if, then, else}, {switch, cases, default} or {send, to, else}. Refused, each with
the node and the fix: unknown names, no START, no way to END, nodes that nothing leads to, keys read before they are
written, two writers of one key in one superstep, and loops without a cap.

A loop has a cap if both hold for every cycle: it contains an edge that can be taken a limited number of times (a
condition that holds only while `wants_search` or `hop_below` does, or `send: pending`), and a node that writes `hop`
(a retriever), so that the number runs out. `wants_search` and `send: pending` end at `graph.max_hops` for any node that
writes `pending`.

A retry has a cap too: an `if` that leads back through a node which asks for searches (`check: {if: {field_equals: ..},
then: rewriter, else: END}`) does so while search rounds remain, and at most `graph.max_hops` times an episode.

A function without `writes` may write any key as far as these checks go, except `hop` and `evidence`: a function that
raises the one or keeps the other has to say so, or the loop has no cap and the retriever keeps all it finds.

Two things LangGraph leaves to the author are done here. Parallel chains of plain edges with different lengths that meet
again are joined by a barrier, so that what follows runs once. A subgraph gives back only what it changed: an appended
list handed back whole would be appended to itself.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypedDict, cast

from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Send

from jointrag.agents.base import Agent
from jointrag.agents.registry import build_agent, check_arguments, load_plugins, resolve
from jointrag.configs.load import load_config, load_graph
from jointrag.configs.schema import VARIANTS, Config, GraphConfig
from jointrag.data.errors import ConfigError, GraphError, nearest
from jointrag.graph.conditions import Condition, compile_condition
from jointrag.graph.context import RagContext
from jointrag.graph.state import MERGE, Passages, RagState

BASE_KEYS = tuple(RagState.__annotations__)
STARTS_EMPTY = frozenset({"question", "queries", "pending", "evidence", "hop"})  # may be read by any node, any time
NO_LIST = frozenset({"question", "hop", "answer"})  # cannot be sent item by item
FORMS = {"if": ("if", "then", "else"), "switch": ("switch", "cases", "default"), "send": ("send", "to", "else")}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # names are folders of heads, flags and LangGraph nodes


@dataclass(frozen=True)
class Node:
    """One node as declared. `writes` None = unknown: a function that does not say."""

    name: str
    run: Any
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] | None = ()
    sure: tuple[str, ...] | None = None  # written on every way through it; None = `writes`
    agents: tuple[Agent, ...] = ()

    def may_write(self, key: str) -> bool:
        """False where the node surely leaves `key` alone."""
        return self.writes is None or key in self.writes


@dataclass(frozen=True)
class Route:
    """One way out of a node."""

    targets: tuple[str, ...]  # several = all, in one superstep
    label: str = ""
    bounded: bool = False  # can be taken a limited number of times
    retry: bool = False  # taken while hops remain, at most max_hops times an episode


@dataclass(frozen=True)
class Edge:
    """All ways out of a node, and how one is chosen."""

    form: str  # to | if | switch | send
    routes: tuple[Route, ...]
    condition: Condition | None = None  # if
    key: str = ""  # switch, send
    cases: tuple[Any, ...] = ()  # switch: parallel to routes[:-1]

    @property
    def targets(self) -> tuple[str, ...]:
        """All nodes it can lead to, END included."""
        return tuple(dict.fromkeys(t for r in self.routes for t in r.targets))


@dataclass
class Declared:
    """A declared graph: `graph` is compiled and ready for a Pipeline, `builder` is the StateGraph before that."""

    config: GraphConfig
    builder: StateGraph[Any, RagContext, Any, Any]
    agents: list[Agent]
    functions: dict[str, Callable[..., Any]]
    nodes: dict[str, Node]
    edges: dict[str, Edge]
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of a subgraph: node -> keys it expects filled
    sure: frozenset[str] = frozenset()  # keys filled on every way to END

    @functools.cached_property
    def graph(self) -> Any:
        """The compiled graph."""
        return self.builder.compile(name="graph")

    @property
    def names(self) -> list[str]:
        """Names of all agents, those of subgraphs included."""
        return [agent.name for agent in self.agents]

    @property
    def evidence_written(self) -> bool:
        """False where no node says that it writes evidence: the retriever then keeps all it finds."""
        return any(node.writes is not None and "evidence" in node.writes for node in self.nodes.values())

    @property
    def recursion_limit(self) -> int:
        """Supersteps one question can need."""
        return recursion_limit(self.config)

    def mermaid(self) -> str:
        """Return the drawing, subgraphs opened."""
        return str(self.graph.get_graph(xray=True).draw_mermaid())


def declare_config(config: Config) -> Declared:
    """Declare the graph of a whole config, with its prompt files, and check what the config says of its agents."""
    prompts = {name: agent.prompt for name, agent in config.agents.items() if agent.prompt is not None}
    declared = declare(config.graph, config.plugins, prompts=prompts)
    check_agents(config, declared.names)
    return declared


def declare(
    graph: GraphConfig | Mapping[str, Any],
    plugins: Sequence[str | Path] = (),
    *,
    prompts: Mapping[str, str] | None = None,
) -> Declared:
    """Build and check the graph. `plugins`: the user's files. `prompts`: agent -> instruction file."""
    if not isinstance(graph, GraphConfig):
        graph = load_config({"graph": dict(graph)}, need_data=False).graph
    declared = _declare(graph, load_plugins(plugins), dict(prompts or {}), graph.max_hops, ())
    for name in prompts or {}:
        if name not in declared.names:
            raise _unknown_agent(f"agents.{name}", name, declared.names)
    return declared


def recursion_limit(config: Config | GraphConfig) -> int:
    """Return supersteps enough for every search round to visit every node (LangGraph's `recursion_limit`)."""
    graph = config.graph if isinstance(config, Config) else config
    rounds = max([graph.max_hops, *_hop_bounds(graph.edges)]) + 2
    return rounds * 2 * (len(graph.nodes) + 1) + 10


def _hop_bounds(spec: Any) -> list[int]:
    if isinstance(spec, Mapping):
        found = [b for value in spec.values() for b in _hop_bounds(value)]
        bound = spec.get("hop_below")
        bound = bound.get("n") if isinstance(bound, Mapping) else bound
        return [*found, bound] if isinstance(bound, int) else found
    return [b for value in spec for b in _hop_bounds(value)] if isinstance(spec, list) else []


def check_agents(config: Config, names: Sequence[str]) -> None:
    """Refuse settings for agents that the graph does not have, and a head map that repeats one."""
    for name in config.agents:
        if name not in names:
            raise _unknown_agent(f"agents.{name}", name, names)
    for name in config.rewards.process:
        if name not in names:
            raise _unknown_agent(f"rewards.process.{name}", name, names)
    blocks = [*VARIANTS, *(f"without_{n}" for n in names)]
    for name in config.eval.variants:
        if name not in blocks:
            raise ConfigError(
                f"eval.variants: got {name!r}, expected some of {', '.join(blocks)}; correct the name."
                f"{nearest(name, blocks)}"
            )
    if isinstance(config.llm.heads, dict):
        mapped = [name for agents in config.llm.heads.values() for name in agents]
        for name in mapped:
            if name not in names:
                raise _unknown_agent("llm.heads", name, names)
            if mapped.count(name) > 1:
                raise ConfigError(f"llm.heads: got {name!r} under two heads, expected one head an agent; remove one.")
        for name in names:  # an agent that the map leaves out has a head of its own, by its own name
            if name not in mapped and name in config.llm.heads:
                raise ConfigError(
                    f"llm.heads: got a head {name!r} without the agent of that name, which has a head {name!r} of its "
                    f"own; rename the head, or add {name!r} to it."
                )


def _unknown_agent(where: str, name: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{where}: got {name!r}, expected an agent of this graph: one of {', '.join(names) or 'none'}; correct the "
        f"name, or remove it (in a file with a parent: `{name}: null`).{nearest(name, names)}"
    )


# --- building ---------------------------------------------------------------------------------------------------------


def _declare(
    config: GraphConfig,
    plugins: Mapping[str, ModuleType],
    prompts: Mapping[str, str],
    max_hops: int,
    inside: tuple[Path, ...],
) -> Declared:
    merges = _state_keys(config)
    if not config.nodes:
        raise GraphError("graph.nodes: got no node, expected at least one; add `answerer: {type: answerer}`.")
    functions: dict[str, Callable[..., Any]] = {}
    nodes: dict[str, Node] = {}
    for name, spec in config.nodes.items():
        where = f"graph.nodes.{name}"
        _check_name(name, merges, where)
        spec = dict(spec)
        kind = spec.get("type")
        if kind == "function":
            nodes[name] = _function_node(name, spec, plugins, merges, where)
            functions[name] = nodes[name].run.function
        elif kind == "subgraph":
            nodes[name], inner = _subgraph_node(name, spec, plugins, prompts, merges, max_hops, inside, where)
            functions |= {f"{name}.{f}": call for f, call in inner.functions.items()}
        else:
            if name in prompts:
                if spec.get("prompt") not in (None, prompts[name]):
                    raise GraphError(f"{where}.prompt: got a second prompt beside agents.{name}.prompt; remove one.")
                spec["prompt"] = prompts[name]
            nodes[name] = _agent_node(build_agent(name, spec, plugins, where), merges, where)
    agents = [agent for node in nodes.values() for agent in node.agents]
    for a, b in combinations(agents, 2):
        if a.name == b.name:
            raise GraphError(
                f"graph.nodes: got two agents named {a.name!r}, expected one name each, subgraphs included; rename one."
            )
    edges = _edges(config, nodes, merges, plugins, max_hops)
    _check_reachable(nodes, edges)
    edges = _with_retries(edges)
    _check_loops(nodes, edges)
    _check_writers(nodes, edges, merges)
    needs, sure = _check_reads(nodes, edges, merges, is_subgraph=bool(inside))
    builder = _assemble(nodes, edges, _schema(config), max_hops)
    return Declared(config, builder, agents, functions, nodes, edges, needs, sure)


def _state_keys(config: GraphConfig) -> dict[str, str]:
    """Return every state key with how it merges; "" = one writer a superstep."""
    for key in config.state:
        if key in BASE_KEYS:
            raise GraphError(
                f"graph.state.{key}: got a key that every graph has, with its own merge rule; expected a new name; "
                f"remove it or rename it, for example to my_{key}."
            )
        if not key.isidentifier():
            raise GraphError(f"graph.state.{key}: got {key!r}, expected a name of letters, digits and _; rename it.")
    base = {"question": "", "answer": "", "queries": "append", "passages": "round", "evidence": "union"}
    own = {key: "" if MERGE[spec.merge] is None else spec.merge for key, spec in config.state.items()}
    return {**{key: base.get(key, "max" if key == "hop" else "replace") for key in BASE_KEYS}, **own}


def _schema(config: GraphConfig) -> type[Any]:
    """Return RagState with the extra keys; a single value written to a list key is one item of it."""
    if not config.state:
        return RagState
    hints: dict[str, Any] = dict(typing.get_type_hints(RagState, include_extras=True))
    for key, spec in config.state.items():
        merge = MERGE[spec.merge]
        if merge is None:
            hints[key] = Any
        elif spec.merge == "max":
            hints[key] = Annotated[Any, merge]
        else:
            hints[key] = Annotated[list, _of_items(merge)]
    return TypedDict("DeclaredState", hints, total=False)  # type: ignore[operator, no-any-return]


def _of_items(merge: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def merged(old: Any, new: Any) -> Any:
        return merge(old, new if isinstance(new, (list, tuple)) else [new])

    return merged


def _check_name(name: str, merges: Mapping[str, str], where: str) -> None:
    if name in ("START", "END") or not NAME.fullmatch(name):
        raise GraphError(
            f"{where}: got the name {name!r}, expected letters, digits, _ and - (START and END are taken); rename it."
        )
    if name in merges:
        raise GraphError(f"{where}: got the name of a state key, expected a name of its own; rename the node.")


def _agent_node(agent: Agent, merges: Mapping[str, str], where: str) -> Node:
    kind = type(agent).__name__
    for verb, keys in (("reads", agent.reads), ("writes", agent.writes)):
        for key in keys:
            if key not in merges:
                raise GraphError(
                    f"{where}: {kind} {verb} {key!r}, expected a state key: one of {', '.join(merges)}; declare it: "
                    f"`graph: {{state: {{{key}: {{merge: replace}}}}}}`.{nearest(key, merges)}"
                )
    return Node(agent.name, agent, tuple(agent.reads), tuple(agent.writes), agents=(agent,))


class _Function:
    """An async node around the user's plain function, so that it runs in the event loop and not in a thread."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        keys: Sequence[str],
        writes: Sequence[str] | None,
    ) -> None:
        self.name, self.function, self.arguments = name, function, dict(arguments)
        self.keys, self.writes = keys, writes

    async def __call__(self, state: Any) -> dict[str, Any]:
        update = self.function(state, **self.arguments)
        if inspect.isawaitable(update):
            update = await update
        if update is None:
            return {}
        if not isinstance(update, Mapping):
            raise GraphError(
                f"function node {self.name!r}: got {type(update).__name__} back, expected an update: a dict of state "
                f"keys; return {{}} for none."
            )
        for key in update:
            if key not in (self.keys if self.writes is None else self.writes):
                raise GraphError(
                    f"function node {self.name!r}: got the key {key!r} in its update, expected one of "
                    f"{', '.join(self.keys if self.writes is None else self.writes)}; declare it under graph.state"
                    f"{'' if self.writes is None else ' and in `writes`'}.{nearest(str(key), self.keys)}"
                )
        return dict(update)


def _function_node(
    name: str, spec: dict[str, Any], plugins: Mapping[str, ModuleType], merges: Mapping[str, str], where: str
) -> Node:
    call, writes = spec.get("call"), spec.get("writes")
    if not isinstance(call, str):
        raise GraphError(f"{where}.call: got {call!r}, expected a plugin's function; write `call: my_agents.join`.")
    function = resolve(call, plugins, f"{where}.call")
    if not callable(function) or isinstance(function, type):
        hint = f" For an agent write `{{type: {call}}}`." if isinstance(function, type) else ""
        raise GraphError(f"{where}.call: got {call!r}, expected a function that takes the state; name one.{hint}")
    if writes is not None:
        if not isinstance(writes, list):
            raise GraphError(
                f"{where}.writes: got {writes!r}, expected a list of state keys; write `writes: [answer]`."
            )
        for key in writes:
            if key not in merges:
                raise GraphError(
                    f"{where}.writes: got {key!r}, expected state keys: {', '.join(merges)}; declare it under "
                    f"graph.state.{nearest(str(key), merges)}"
                )
    try:
        takes = len(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        takes = 1
    if not takes:
        raise GraphError(f"{where}.call: got {call!r} without parameters, expected `def {call.split('.')[-1]}(state)`.")
    extra = {key: value for key, value in spec.items() if key not in ("type", "call", "writes")}
    arguments = check_arguments(function, extra, where, skip=1)
    keys = tuple(merges)
    return Node(
        name,
        _Function(name, function, arguments, keys, None if writes is None else tuple(writes)),
        writes=None if writes is None else tuple(writes),
    )


def _subgraph_node(
    name: str,
    spec: dict[str, Any],
    plugins: Mapping[str, ModuleType],
    prompts: Mapping[str, str],
    merges: Mapping[str, str],
    max_hops: int,
    inside: tuple[Path, ...],
    where: str,
) -> tuple[Node, Declared]:
    path = spec.get("config")
    if not isinstance(path, (str, os.PathLike)):
        raise GraphError(f"{where}.config: got {path!r}, expected a file; write `config: other_graph.yaml`.")
    for key in spec:
        if key not in ("type", "config"):
            raise GraphError(
                f"{where}.{key}: got an unknown parameter, expected type, config; remove it."
                f"{nearest(key, ('type', 'config'))}"
            )
    file = Path(path).resolve()
    if file in inside:
        ring = " -> ".join(p.name for p in (*inside, file))
        raise GraphError(f"{where}.config: got the ring {ring}, expected subgraphs that end; remove one.")
    try:
        config, own_plugins = load_graph(path)
        for key, key_spec in config.state.items():
            if key in merges and merges[key] != ("" if MERGE[key_spec.merge] is None else key_spec.merge):
                raise GraphError(
                    f"graph.state.{key}: got merge {key_spec.merge!r}, expected the {merges[key] or 'replace'!r} of "
                    f"the graph around it; make them agree, or rename the key."
                )
        inner = _declare(config, {**plugins, **load_plugins(own_plugins)}, prompts, max_hops, (*inside, file))
    except ConfigError as e:
        raise GraphError(f"{where} ({path}): {e}") from e
    shared = [key for key in merges if key in BASE_KEYS or key in config.state]
    compiled, limit = inner.graph, inner.recursion_limit

    async def run(state: Any, config: RunnableConfig) -> dict[str, Any]:
        given = {key: state[key] for key in shared if key in state}
        after = await compiled.ainvoke(given, {**config, "recursion_limit": limit})
        return {key: new for key in shared if (new := _change(merges[key], given.get(key), after.get(key))) is not None}

    writes = [key for key in shared if any(node.may_write(key) for node in inner.nodes.values())]
    unknown = any(node.writes is None for node in inner.nodes.values())
    needs = tuple(dict.fromkeys(key for keys in inner.needs.values() for key in keys if key in merges))
    node = Node(
        name,
        run,
        reads=needs,
        writes=None if unknown else tuple(writes),
        sure=tuple(key for key in shared if key in inner.sure),
        agents=tuple(inner.agents),
    )
    return node, inner


def _change(merge: str, before: Any, after: Any) -> Any:
    """Return what a subgraph added to one key, None where it changed nothing."""
    if merge == "append":
        return list(after or ())[len(before or ()) :] or None
    same_round = getattr(before, "hop", None) == getattr(after, "hop", None) or not isinstance(after, Passages)
    return None if before == after and same_round else after


# --- edges ------------------------------------------------------------------------------------------------------------


def _edges(
    config: GraphConfig,
    nodes: Mapping[str, Node],
    merges: Mapping[str, str],
    plugins: Mapping[str, ModuleType],
    max_hops: int,
) -> dict[str, Edge]:
    if "END" in config.edges:
        raise GraphError("graph.edges.END: got an edge from END, expected none: END ends the episode; remove it.")
    if config.edges.get("START") is None:
        first = next(iter(nodes))
        raise GraphError(f"graph.edges: got no START, expected where an episode begins; add `START: {first}`.")
    edges: dict[str, Edge] = {}
    for source, spec in config.edges.items():
        where = f"graph.edges.{source}"
        if source != "START" and source not in nodes:
            raise GraphError(
                f"{where}: got an edge from an unknown node, expected START or one of {', '.join(nodes)}; correct the "
                f"name or declare it under graph.nodes.{nearest(source, nodes)}"
            )
        edges[source] = _edge(spec, where, nodes, merges, plugins, max_hops)
    for name in nodes:
        if name not in edges:
            raise GraphError(
                f"graph.nodes.{name}: got no edge from it, expected to know what follows; add `{name}: END` "
                f"to graph.edges."
            )
    return edges


def _edge(
    spec: Any,
    where: str,
    nodes: Mapping[str, Node],
    merges: Mapping[str, str],
    plugins: Mapping[str, ModuleType],
    max_hops: int,
) -> Edge:
    to = functools.partial(_targets, nodes=nodes)
    if not isinstance(spec, Mapping):
        return Edge("to", (Route(to(spec, where)),))
    form = next((form for form in FORMS if form in spec), None)
    if form is None:
        known = [key for keys in FORMS.values() for key in keys]
        hint = next((h for key in spec if (h := nearest(str(key), known))), "")
        raise GraphError(
            f"{where}: got {dict(spec)!r}, expected a target, a list of targets, {{if, then, else}}, "
            f"{{switch, cases, default}} or {{send, to, else}}; choose one form.{hint}"
        )
    keys = FORMS[form]
    for key in spec:
        if key not in keys:
            raise GraphError(
                f"{where}.{key}: got an unknown key beside {form!r}, expected {', '.join(keys)}; correct or remove it."
                f"{nearest(str(key), keys)}"
            )
    for key in keys:
        if spec.get(key) is None:
            raise GraphError(f"{where}: got no {key!r} beside {form!r}, expected {', '.join(keys)}; add `{key}: ...`.")
    if form == "if":
        condition = compile_condition(
            spec["if"], plugins=plugins, keys=tuple(merges), max_hops=max_hops, where=f"{where}.if"
        )
        then = Route(to(spec["then"], f"{where}.then"), condition.label, condition.bounded(True))
        other = Route(to(spec["else"], f"{where}.else"), "else", condition.bounded(False))
        return Edge("if", (then, other), condition)
    key = spec[form]
    if not isinstance(key, str) or key not in merges:
        raise GraphError(
            f"{where}.{form}: got {key!r}, expected a state key: one of {', '.join(merges)}; correct it, or declare it "
            f"under graph.state.{nearest(str(key), merges)}"
        )
    if form == "switch":
        cases = spec["cases"]
        if not isinstance(cases, Mapping) or not cases:
            raise GraphError(
                f"{where}.cases: got {cases!r}, expected value: target; write `cases: {{bridge: rewriter}}`."
            )
        routes = [Route(to(target, f"{where}.cases.{case}"), f"{key} = {case}") for case, target in cases.items()]
        routes.append(Route(to(spec["default"], f"{where}.default"), "default"))
        return Edge("switch", tuple(routes), key=key, cases=tuple(cases))
    if key in NO_LIST or merges[key] == "max":
        raise GraphError(
            f"{where}.send: got {key!r}, which holds one value, expected a key that holds a list; name one."
        )
    if not isinstance(spec["to"], str):
        raise GraphError(
            f"{where}.to: got {spec['to']!r}, expected one node that every item goes to; for several, send to a "
            f"function or subgraph node that leads to them."
        )
    targets = to(spec["to"], f"{where}.to")
    if targets == (END,):
        raise GraphError(f"{where}.to: got END, expected a node that takes the items; END stands under `else`.")
    return Edge(
        "send",
        (Route(targets, f"each of {key}", bounded=key == "pending"), Route(to(spec["else"], f"{where}.else"), "else")),
        key=key,
    )


def _targets(spec: Any, where: str, nodes: Mapping[str, Node]) -> tuple[str, ...]:
    names = spec if isinstance(spec, list) else [spec]
    if not names:
        raise GraphError(f"{where}: got an empty list, expected at least one target; write END to stop here.")
    for name in names:
        if name == "START":
            raise GraphError(
                f"{where}: got START as a target, expected a node or END: nothing leads to START; name one."
            )
        if not isinstance(name, str) or (name != "END" and name not in nodes):
            raise GraphError(
                f"{where}: got the unknown target {name!r}, expected END or one of {', '.join(nodes)}; correct the "
                f"name or declare it under graph.nodes.{nearest(str(name), (*nodes, 'END'))}"
            )
        if names.count(name) > 1 or (name == "END" and len(names) > 1):
            raise GraphError(f"{where}: got {names!r}, expected different nodes, or END alone; remove {name!r}.")
    return tuple(END if name == "END" else name for name in names)


# --- checks of the whole ----------------------------------------------------------------------------------------------


def _arcs(edges: Mapping[str, Edge]) -> list[tuple[str, str, bool]]:
    routes = [(source, route) for source, edge in edges.items() for route in edge.routes]
    return [(source, t, route.bounded or route.retry) for source, route in routes for t in route.targets]


def _reach(start: Iterable[str], arcs: Iterable[tuple[str, str]]) -> set[str]:
    following: dict[str, list[str]] = {}
    for a, b in arcs:
        following.setdefault(a, []).append(b)
    seen, todo = set(start), list(start)
    while todo:
        for b in following.get(todo.pop(), ()):
            if b not in seen:
                seen.add(b)
                todo.append(b)
    return seen


def _check_reachable(nodes: Mapping[str, Node], edges: Mapping[str, Edge]) -> None:
    arcs = [(a, b) for a, b, _ in _arcs(edges)]
    reached = _reach(["START"], arcs)
    for name in nodes:
        if name not in reached:
            raise GraphError(
                f"graph.nodes.{name}: got a node that nothing leads to, expected a way from START; name it as a target "
                f"in graph.edges, or remove it (in a file with a parent: `{name}: null`)."
            )
    ends = _reach([END], [(b, a) for a, b in arcs])
    for name in nodes:
        if name not in ends:
            raise GraphError(
                f"graph.edges.{name}: got no path from {name!r} to END, expected every episode to be able to end; lead "
                f"one of {', '.join(n for n in nodes if n not in ends)} to END, or make an edge conditional."
            )


def _with_retries(edges: Mapping[str, Edge]) -> dict[str, Edge]:
    """Mark the way of an `if` that closes an unbounded loop through another node which asks for searches."""
    arcs = [(a, b) for a, b, bounded in _arcs(edges) if not bounded]
    asking = [s for s, edge in edges.items() if s != "START" and any(route.bounded for route in edge.routes)]
    out = dict(edges)
    for source, edge in edges.items():
        if edge.form != "if" or source == "START" or source in asking:
            continue
        again = tuple(
            any(a in _reach(route.targets, arcs) and source in _reach([a], arcs) for a in asking)
            for route in edge.routes
        )
        if again in ((True, False), (False, True)):
            routes = tuple(replace(r, retry=back) for r, back in zip(edge.routes, again, strict=True))
            out[source] = replace(edge, routes=routes)
    return out


def _check_loops(nodes: Mapping[str, Node], edges: Mapping[str, Edge]) -> None:
    arcs = [(a, b, bounded) for a, b, bounded in _arcs(edges) if a in nodes and b in nodes]
    if free := _cycle([(a, b) for a, b, bounded in arcs if not bounded]):
        raise GraphError(
            f"graph.edges.{free[0]}: got the loop {' -> '.join([*free, free[0]])} without a cap, expected every loop "
            f"to end; make one of its edges conditional on wants_search or hop_below, as in "
            f"{{if: {{all: [.., {{hop_below: {{n: 3}}}}]}}, then: {free[0]}, else: END}}."
        )
    counts = {name for name, node in nodes.items() if node.writes is not None and "hop" in node.writes}
    retried = {(s, t) for s, edge in edges.items() for route in edge.routes if route.retry for t in route.targets}
    arcs = [(a, b, bounded) for a, b, bounded in arcs if (a, b) not in retried]
    if free := _cycle([(a, b) for a, b, _ in arcs if a not in counts and b not in counts]):
        raise GraphError(
            f"graph.edges.{free[0]}: got the loop {' -> '.join([*free, free[0]])} without a retriever in it, expected "
            f"a node that raises `hop`, or its cap never comes; lead it through a retriever, or through a function "
            f"with `writes: [hop]`."
        )


def _cycle(arcs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the nodes of one cycle, [] if there is none."""
    for start in dict.fromkeys(a for a, _ in arcs):
        came: dict[str, str] = {}
        todo = [start]
        while todo:
            here = todo.pop()
            for a, b in arcs:
                if a == here and b == start:
                    way = [here]
                    while way[0] != start:
                        way.insert(0, came[way[0]])
                    return way
                if a == here and b not in came:
                    came[b] = here
                    todo.append(b)
    return []


def _check_writers(nodes: Mapping[str, Node], edges: Mapping[str, Edge], merges: Mapping[str, str]) -> None:
    """Two writers of a single-value key in one superstep: LangGraph would stop at run time."""

    def single(node: Node) -> set[str]:
        return {key for key in node.writes or () if merges[key] == ""}

    for source, edge in edges.items():
        for route in edge.routes:
            chains = _chains([t for t in route.targets if t != END], edges)
            beside = [pair for one, two in combinations(chains, 2) for pair in zip(one, two, strict=False)]
            for a, b in beside:
                for key in sorted(single(nodes[a]) & single(nodes[b])) if a != b else ():
                    raise GraphError(
                        f"graph.edges.{source}: got {a!r} and {b!r} in one superstep, which both write {key!r}, "
                        f"expected one writer of a single value; put one after the other"
                        f"{'' if key in BASE_KEYS else f', or give graph.state.{key} merge: append, union or max'}."
                    )
        if edge.form == "send":
            target = edge.routes[0].targets[0]
            for key in sorted(single(nodes[target])):
                raise GraphError(
                    f"graph.edges.{source}.to: got {target!r}, whose branches would all write {key!r} at once, "
                    f"expected one writer of a single value; send to a node that writes a list, then lead that to "
                    f"{target!r}."
                )


def _check_reads(
    nodes: Mapping[str, Node], edges: Mapping[str, Edge], merges: Mapping[str, str], is_subgraph: bool
) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """Refuse keys read before they are written; in a subgraph return them: the graph around it may have written them.

    A single value (answer, an extra key that replaces or takes the maximum) must be written on every way to the reader;
    for a list (passages, an extra key that appends) it is enough that some node before it writes it.
    """
    single = {key for key in merges if key not in STARTS_EMPTY and (merges[key] in ("", "max"))}
    lists = {key for key in merges if key not in STARTS_EMPTY and key not in single}
    arcs = [(a, b) for a, b, _ in _arcs(edges)]
    before: dict[str, list[str]] = {}
    for a, b in arcs:
        before.setdefault(b, []).append(a)

    def sure(name: str) -> set[str]:
        node = nodes[name]
        written = node.writes if node.sure is None else node.sure
        return single if written is None else single & set(written)

    beside: dict[str, set[str]] = {}  # what parallel branches write that a branch's own path does not show
    for edge in edges.values():
        for route in edge.routes:
            for t in route.targets if len(route.targets) > 1 else ():
                others = _reach([o for o in route.targets if o != t], arcs) - _reach([t], arcs) - {END}
                beside.setdefault(t, set()).update(*(sure(o) for o in others))

    must = {name: set(single) for name in [*nodes, END]}  # on entry
    may = {name: set[str]() for name in [*nodes, END]}
    changed = True
    while changed:
        changed = False
        for name in must:
            come = [p for p in before.get(name, ()) if p in nodes]
            outs = [must[p] | sure(p) | beside.get(p, set()) for p in come]
            if len(come) < len(before.get(name, ())):  # from START too
                outs.append(set())
            new = functools.reduce(operator.and_, outs) if outs else set()
            new_may = {key for p in come for key in lists | single if key in may[p] or nodes[p].may_write(key)}
            if new != must[name] or new_may != may[name]:
                must[name], may[name], changed = new, new_may, True

    needs: dict[str, tuple[str, ...]] = {}
    config_keys = [key for key in merges if key not in BASE_KEYS]
    for name, node in nodes.items():
        missing = [key for key in node.reads if key in single - must[name] or key in lists - may[name]]
        if missing and is_subgraph:
            needs[name] = tuple(missing)
        for key in () if is_subgraph else missing:
            writers = [n for n, other in nodes.items() if other.writes is not None and key in other.writes]
            sometimes = key in may[name]
            who = "not every way to it has" if sometimes else "no node before it has"
            fix = " or ".join(map(repr, writers)) or f"a node that writes {key!r}"
            empty = (
                ", or declare merge: append, which starts as an empty list" if sometimes and key in config_keys else ""
            )
            raise GraphError(
                f"graph.nodes.{name}: reads {key!r}, which {who} written, expected it to be written first; lead to "
                f"{name!r} through {fix}{empty}."
            )
    for source, edge in edges.items():
        read = (edge.condition.keys if edge.condition else frozenset()) | ({edge.key} if edge.key else set())
        for key in sorted(read & (single | lists)):
            seen = source != "START" and (key in may[source] or nodes[source].may_write(key))
            if not seen and not is_subgraph:
                raise GraphError(
                    f"graph.edges.{source}: decides by {key!r}, which no node before it writes, expected it to be "
                    f"written first; add it to the `writes` of a node before, or decide by another key."
                )
    return needs, frozenset(must[END])


# --- to LangGraph -----------------------------------------------------------------------------------------------------


def _assemble(
    nodes: Mapping[str, Node], edges: Mapping[str, Edge], schema: type[Any], max_hops: int
) -> StateGraph[Any, RagContext, Any, Any]:
    builder: StateGraph[Any, RagContext, Any, Any] = StateGraph(schema, context_schema=RagContext)
    for name, node in nodes.items():
        builder.add_node(name, node.run)
    sent = {edge.routes[0].targets[0] for edge in edges.values() if edge.form == "send"}
    barriers = _barriers(edges)
    waiting = {last for lasts, _ in barriers for last in lasts}
    for lasts, join in barriers:
        builder.add_edge(list(lasts), join)
    for source, edge in edges.items():
        at = START if source == "START" else source
        if edge.form == "to":
            for target in edge.routes[0].targets if source not in waiting else ():
                builder.add_edge(at, target)
            continue
        if source in sent:  # decide once, after all branches, on what they wrote together
            at = f"after_{source}"
            while at in nodes:
                at += "_"
            builder.add_node(at, _pass)
            builder.add_edge(source, at)
        labels: dict[str, str] = {}
        ways: list[list[str]] = []
        for route in edge.routes:
            text = re.sub(r"[^\w .,=<>-]", " ", route.label).strip() or "is"
            ways.append([])
            for i, target in enumerate(route.targets):
                label = text if i == 0 else f"{text}, {i + 1}"
                while label in labels:
                    label += "_"
                labels[label] = target
                ways[-1].append(label)
        builder.add_conditional_edges(at, _chooser(source, edge, ways, max_hops), cast(Any, labels))
    return builder


async def _pass(state: Any) -> dict[str, Any]:
    """Write nothing: a place for what is decided after parallel branches."""
    return {}


def _chooser(source: str, edge: Edge, ways: list[list[str]], max_hops: int) -> Callable[..., Any]:
    """Return the async function (a plain one would run in a thread) that picks the labels to follow, or sends items."""
    if edge.condition is not None:
        condition = edge.condition
        again = next((i for i, route in enumerate(edge.routes) if route.retry), None)

        async def decide(state: Any, runtime: Runtime[RagContext]) -> list[str]:
            way = 0 if condition(state) else 1
            if way == again:
                used = runtime.context.retries if runtime.context else Counter[str]()
                if int(state.get("hop") or 0) >= max_hops or used[source] >= max_hops:
                    return ways[1 - way]
                used[source] += 1
            return ways[way]

        return decide
    if edge.form == "switch":

        async def switch(state: Any) -> list[str]:
            value = state.get(edge.key)
            at = next((i for i, case in enumerate(edge.cases) if _same(case, value)), -1)
            return ways[at]

        return switch

    async def send(state: Any) -> list[Any]:
        items = state.get(edge.key) or []
        if edge.key == "pending" and int(state.get("hop") or 0) >= max_hops:
            items = []
        items = items if isinstance(items, (list, tuple)) else [items]
        target = edge.routes[0].targets[0]
        return [Send(target, {**state, edge.key: [item]}) for item in items] or list(ways[1])

    return send


def _same(case: Any, value: Any) -> bool:
    """Equal, and a YAML `true` is not a 1."""
    return bool(case == value) and isinstance(case, bool) == isinstance(value, bool)


def _barriers(edges: Mapping[str, Edge]) -> list[tuple[tuple[str, ...], str]]:
    """Return (last nodes, join) of parallel chains of plain edges with different lengths that meet again."""
    out = []
    for route in (route for edge in edges.values() for route in edge.routes if len(route.targets) > 1):
        chains = _chains(route.targets, edges)
        join = next((name for name in chains[0] if all(name in chain for chain in chains)), None)
        if join is None or len({chain.index(join) for chain in chains}) == 1 or join in route.targets:
            continue
        out.append((tuple(chain[chain.index(join) - 1] for chain in chains), join))
    return out


def _chains(targets: Sequence[str], edges: Mapping[str, Edge]) -> list[list[str]]:
    """Return the nodes that follow each parallel target one after the other, up to and with where others come in."""
    arcs = _arcs(edges)
    chains = []
    for target in targets:
        chain = [target]
        while (
            chain[-1] != END
            and sum(b == chain[-1] for _, b, _ in arcs) == 1
            and edges[chain[-1]].form == "to"
            and len(edges[chain[-1]].targets) == 1
            and edges[chain[-1]].targets[0] not in (END, *chain)
        ):
            chain.append(edges[chain[-1]].targets[0])
        chains.append(chain)
    return chains


__all__ = ["Declared", "check_agents", "declare", "declare_config", "recursion_limit"]

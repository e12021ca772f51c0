# ruff: noqa: E501  (one bad graph a line reads as a table)
from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jointrag.agents.base import Agent
from jointrag.agents.registry import NODES, register
from jointrag.agents.retriever import Retriever
from jointrag.agents.rewriter import Rewriter
from jointrag.configs.load import load_config
from jointrag.data.errors import ConfigError, GraphError
from jointrag.data.types import Question
from jointrag.graph.context import RagContext, Recorder
from jointrag.graph.declare import Declared, declare, declare_config, recursion_limit
from jointrag.graph.episode import Episode
from jointrag.graph.state import RagState, initial

# Every node of the fake pipeline is `step`: it notes what it received and writes what `script` says.
PLUGIN = '''
from jointrag.agents import Agent
from jointrag.llm import actions, types

calls, script = [], {}

def write(name, state):
    """Note the call; return what the script says (a function of the state, or an update)."""
    calls.append((name, dict(state)))
    update = script.get(name, {})
    return update(state) if callable(update) else update

def step(state, name: str): return write(name, state)
async def later(state, name: str = "later"): return write(name, state)
def bare(): return {}
def is_retry(state): return state.get("verdict") == "retry"
number = 3

class Noted(Agent):
    """An agent whose call needs no language model."""
    reads, writes = ("question",), ("summary",)
    def __init__(self, top: int = 3, names: list[str] | None = None, **others): self.top, self.others = top, others
    async def __call__(self, state, runtime, config): return write(self.name, state)

class Search(Noted):
    writes = ("passages", "hop")
    def __init__(self, k: int = 5): self.k = k
    async def __call__(self, state, runtime, config):
        return {"hop": state.get("hop", 0) + 1, **write(self.name, state)}

class Reader(Noted):
    reads, writes = ("question", "summary"), ("answer",)

class Summariser(Agent):
    name, action = "summariser", actions.FreeText(max_tokens=24)
    reads, writes = ("question", "evidence"), ("summary",)
    def observe(self, state): return types.Observation.of(state, instruction="sum up the evidence")
    def update(self, state, text): return {"summary": text}
    def default(self, state): return {"summary": ""}

class Fragile(Agent):
    def __init__(self, size: int): raise RuntimeError("no room")

class Silent(Agent):
    def update(self, state, value): return {}

class Comma(Summariser):
    writes = "summary"

class NotAnAgent: pass
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "fake_agents.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return path


def steps(*names: str, writes: Mapping[str, list[str]] | None = None) -> dict[str, Any]:
    """Function nodes of these names."""
    extra = {name: {"writes": keys} for name, keys in (writes or {}).items()}
    return {n: {"type": "function", "call": "fake_agents.step", "name": n, **extra.get(n, {})} for n in names}


def built(graph: Mapping[str, Any], plugin: Path, script: Mapping[str, Any] | None = None) -> Declared:
    declared = declare(graph, [plugin])
    fake = sys.modules["fake_agents"]
    fake.calls.clear()
    fake.script.clear()
    fake.script.update(script or {})
    return declared


def run(
    declared: Declared, question: str = "q", **state: Any
) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Return the final state, and what each node received in order."""
    limit = {"recursion_limit": declared.recursion_limit}
    context = RagContext(None, None, Recorder(Episode(Question("q", question, ("x",)), 0)))  # type: ignore[arg-type]
    final = asyncio.run(declared.graph.ainvoke({**initial(question), **state}, limit, context=context))
    return final, list(sys.modules["fake_agents"].calls)


def order(calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [name for name, _ in calls]


# --- every form of edge, executed -------------------------------------------------------------------------------------


def test_a_target_hands_the_state_on(plugin: Path) -> None:
    graph = {"nodes": steps("a", "b"), "edges": {"START": "a", "a": "b", "b": "END"}}
    final, calls = run(built(graph, plugin, {"a": {"queries": ["x"]}, "b": {"answer": "42"}}))
    assert order(calls) == ["a", "b"]
    assert calls[0][1]["question"] == "q" and calls[0][1]["queries"] == []
    assert calls[1][1]["queries"] == ["x"]
    assert final["answer"] == "42"


def test_parallel_targets_share_a_superstep_and_what_follows_runs_once(plugin: Path) -> None:
    graph = {
        "state": {"notes": {"merge": "append"}},
        "nodes": steps("a", "b", "c", "d"),
        "edges": {"START": "a", "a": ["b", "c"], "b": "d", "c": "d", "d": "END"},
    }
    final, calls = run(built(graph, plugin, {"b": {"notes": ["B"]}, "c": {"notes": "C"}}))
    assert sorted(order(calls)) == ["a", "b", "c", "d"] and order(calls)[-1] == "d"
    assert all(state["notes"] == [] for name, state in calls if name in "bc")  # neither saw the other
    assert sorted(calls[-1][1]["notes"]) == ["B", "C"] == sorted(final["notes"])


def test_parallel_chains_of_different_lengths_meet_before_what_follows(plugin: Path) -> None:
    graph = {
        "state": {"notes": {"merge": "append"}},
        "nodes": steps("a", "b", "c", "c2", "c3", "d"),
        "edges": {"START": "a", "a": ["b", "c"], "b": "d", "c": "c2", "c2": "c3", "c3": "d", "d": "END"},
    }
    _, calls = run(built(graph, plugin, {"b": {"notes": "B"}, "c3": {"notes": "C"}}))
    assert order(calls).count("d") == 1 and calls[-1][0] == "d"
    assert calls[-1][1]["notes"] == ["B", "C"]


def test_parallel_chains_that_a_condition_starts_meet_too(plugin: Path) -> None:
    graph: dict[str, Any] = {
        "nodes": steps("a", "b", "c", "c2", "d"),
        "edges": {"START": "a", "a": {"if": {"empty": "evidence"}, "then": ["b", "c"], "else": "d"}},
    }
    graph["edges"] |= {"b": "d", "c": "c2", "c2": "d", "d": "END"}
    assert order(run(built(graph, plugin))[1])[-2:] == ["c2", "d"]
    assert order(run(built(graph, plugin))[1]).count("d") == 1
    assert order(run(built(graph, plugin), evidence=["p"])[1]) == ["a", "d"]


def test_start_may_fan_out_and_decide(plugin: Path) -> None:
    graph = {"nodes": steps("a", "b"), "edges": {"START": ["a", "b"], "a": "END", "b": "END"}}
    assert sorted(order(run(built(graph, plugin))[1])) == ["a", "b"]
    graph["edges"] = {"START": {"if": {"empty": "evidence"}, "then": "a", "else": "b"}, "a": "END", "b": "END"}
    assert order(run(built(graph, plugin))[1]) == ["a"]
    assert order(run(built(graph, plugin), evidence=["p"])[1]) == ["b"]


@pytest.mark.parametrize(("verdict", "taken"), [("retry", "b"), ("good", "c"), (None, "c")])
def test_if_then_else(plugin: Path, verdict: str | None, taken: str) -> None:
    graph = {
        "state": {"verdict": {}},
        "nodes": steps("a", "b", "c"),
        "edges": {
            "START": "a",
            "a": {"if": {"field_equals": {"key": "verdict", "value": "retry"}}, "then": "b", "else": "c"},
            "b": "END",
            "c": "END",
        },
    }
    assert order(run(built(graph, plugin, {"a": {"verdict": verdict}}))[1]) == ["a", taken]


def test_a_plugins_function_decides_and_else_may_be_end_or_several(plugin: Path) -> None:
    graph = {
        "state": {"verdict": {}},
        "nodes": steps("a", "b", "c"),
        "edges": {
            "START": "a",
            "a": {"if": "fake_agents.is_retry", "then": ["b", "c"], "else": "END"},
            "b": "END",
            "c": "END",
        },
    }
    assert sorted(order(run(built(graph, plugin, {"a": {"verdict": "retry"}}))[1])) == ["a", "b", "c"]
    assert order(run(built(graph, plugin, {"a": {"verdict": "good"}}))[1]) == ["a"]


@pytest.mark.parametrize(
    ("value", "taken"),
    [("bridge", "b"), ("yes", "c"), (2, "c"), (1, "d"), (True, "b"), ("other", "d"), (None, "d"), (["bridge"], "d")],
)
def test_switch(plugin: Path, value: Any, taken: str) -> None:
    edges = yaml.safe_load("{bridge: b, 'yes': c, 2: c, true: b}")
    graph = {
        "state": {"hop_type": {"merge": "replace"}},
        "nodes": steps("a", "b", "c", "d"),
        "edges": {
            "START": "a",
            "a": {"switch": "hop_type", "cases": edges, "default": "d"},
            **dict.fromkeys("bcd", "END"),
        },
    }
    assert order(run(built(graph, plugin, {"a": {"hop_type": value}}))[1]) == ["a", taken]


SEND = {
    "nodes": {
        **steps("planner", "join", "reader"),
        "search": {"type": "function", "call": "fake_agents.later", "name": "search", "writes": ["evidence", "hop"]},
    },
    "edges": {
        "START": "planner",
        "planner": {"send": "pending", "to": "search", "else": "reader"},
        "search": "join",
        "join": "reader",
        "reader": "END",
    },
}


def test_send_gives_each_branch_one_item_and_what_follows_runs_once(plugin: Path) -> None:
    script = {
        "planner": {"pending": ["x", "y", "z"], "queries": ["x", "y", "z"]},
        "search": lambda state: {"evidence": [state["pending"][0].upper()], "hop": state["hop"] + 1},
    }
    final, calls = run(built(SEND, plugin, script))
    assert order(calls) == ["planner", "search", "search", "search", "join", "reader"]
    assert [state["pending"] for name, state in calls if name == "search"] == [["x"], ["y"], ["z"]]
    for name, state in calls:
        if name == "search":  # the whole state, the key aside
            assert (state["question"], state["queries"], state["hop"]) == ("q", ["x", "y", "z"], 0)
    assert calls[-2][1]["pending"] == ["x", "y", "z"] and calls[-2][1]["evidence"] == ["X", "Y", "Z"]
    assert final["hop"] == 1


def test_send_goes_to_else_where_there_is_nothing_or_no_round_is_left(plugin: Path) -> None:
    assert order(run(built(SEND, plugin))[1]) == ["planner", "reader"]
    script = {"planner": {"pending": ["x"]}}
    assert order(run(built(SEND, plugin, script), hop=3)[1]) == ["planner", "reader"]  # max_hops is 3


def test_what_is_decided_after_branches_is_decided_once_on_all_they_wrote(plugin: Path) -> None:
    edges = {
        **SEND["edges"],
        "search": {"if": {"field_equals": {"key": "evidence", "value": ["X", "Y"]}}, "then": "join", "else": "END"},
    }
    script = {
        "planner": {"pending": ["x", "y"]},
        "search": lambda state: {"evidence": [state["pending"][0].upper()]},
    }
    declared = built({**SEND, "edges": edges}, plugin, script)
    assert order(run(declared)[1]) == ["planner", "search", "search", "join", "reader"]
    assert "after_search" in declared.mermaid()


def test_sending_in_a_loop_ends_at_the_hop_limit(plugin: Path) -> None:
    edges = {**SEND["edges"], "join": "planner"}
    script = {
        "planner": lambda state: {"pending": [f"{state['hop']}a", f"{state['hop']}b"]},
        "search": lambda state: {"hop": state["hop"] + 1},
    }
    final, calls = run(built({**SEND, "edges": edges, "max_hops": 2}, plugin, script))
    assert order(calls) == ["planner", *(["search"] * 2 + ["join", "planner"]) * 2, "reader"]
    assert final["hop"] == 2


def test_a_loop_ends_with_its_condition_or_its_cap(plugin: Path) -> None:
    graph = {
        "nodes": {**steps("rewriter", "answerer"), "search": {"type": "fake_agents.Search"}},
        "edges": {
            "START": "rewriter",
            "rewriter": {
                "if": {"all": ["wants_search", {"hop_below": {"n": 2}}]},
                "then": "search",
                "else": "answerer",
            },
            "search": "rewriter",
            "answerer": "END",
        },
    }
    final, calls = run(built(graph, plugin, {"rewriter": {"pending": ["again"]}}))
    assert order(calls) == ["rewriter", "search"] * 2 + ["rewriter", "answerer"]
    assert final["hop"] == 2
    assert order(run(built(graph, plugin))[1]) == ["rewriter", "answerer"]


RETRY = {
    "state": {"verdict": {"merge": "replace"}},
    "nodes": {
        **steps("rewriter", "answerer"),
        "search": {"type": "fake_agents.Search"},
        "check": {"type": "function", "call": "fake_agents.later", "name": "check", "writes": ["verdict"]},
    },
    "edges": {
        "START": "rewriter",
        "rewriter": {"if": "wants_search", "then": "search", "else": "answerer"},
        "search": "rewriter",
        "answerer": "check",
        "check": {"if": {"field_equals": {"key": "verdict", "value": "retry"}}, "then": "rewriter", "else": "END"},
    },
}


@pytest.mark.parametrize(
    ("asks", "rounds"),
    [
        (True, ["search", "rewriter", "search", "rewriter", "answerer", "check"]),  # no search is left to retry with
        (False, ["answerer", "check", "rewriter"] * 2 + ["answerer", "check"]),  # nobody searches: twice, then it ends
    ],
)
def test_a_retry_ends_when_searches_or_retries_run_out(plugin: Path, asks: bool, rounds: list[str]) -> None:
    script = {
        "rewriter": lambda state: {"pending": ["again"] if asks and state["hop"] < 2 else []},
        "search": lambda state: {"hop": state["hop"] + 1},
        "check": lambda state: {"verdict": "retry"},
    }
    _, calls = run(built({**RETRY, "max_hops": 2}, plugin, script))
    assert order(calls) == ["rewriter", *rounds]


def test_functions_run_in_the_event_loop_and_not_in_a_thread(plugin: Path) -> None:
    seen: list[bool] = []

    def update(state: Any) -> dict[str, Any]:
        seen.append(threading.current_thread() is threading.main_thread())
        return {}

    graph = {
        "nodes": {"a": {"type": "function", "call": "fake_agents.later", "name": "a"}, **steps("b")},
        "edges": {"START": "a", "a": {"if": "wants_search", "then": "b", "else": "b"}, "b": "END"},
    }
    run(built(graph, plugin, {"a": update, "b": update}))
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (["x"], "function node 'a': got list back, expected an update"),
        ({"anser": 1}, "got the key 'anser' in its update.*Did you mean 'answer'"),
    ],
)
def test_a_function_that_returns_no_update_is_told_so(plugin: Path, update: Any, message: str) -> None:
    graph = {"nodes": steps("a"), "edges": {"START": "a", "a": "END"}}
    with pytest.raises(GraphError, match=message):
        run(built(graph, plugin, {"a": update}))
    graph = {"nodes": steps("a", writes={"a": ["queries"]}), "edges": {"START": "a", "a": "END"}}
    with pytest.raises(GraphError):
        run(built(graph, plugin, {"a": {"answer": "x"}}))


# --- agents and subgraphs ---------------------------------------------------------------------------------------------


def test_a_nodes_key_names_its_agent_and_its_parameters_are_the_constructors() -> None:
    declared = declare(
        {
            "nodes": {
                "asker": {"type": "rewriter", "max_queries": 3},
                "r1": {"type": "retriever", "k": 2},
                "r2": {"type": "retriever", "k": 7, "tau": 1, "trainable": False},
                "answerer": {"type": "answerer"},
            },
            "edges": {"START": "asker", "asker": ["r1", "r2"], "r1": "answerer", "r2": "answerer", "answerer": "END"},
        }
    )
    assert declared.names == ["asker", "r1", "r2", "answerer"]
    asker, r1, r2, _ = declared.agents
    assert isinstance(asker, Rewriter) and asker.action.max_queries == 3
    assert isinstance(r1, Retriever) and isinstance(r2, Retriever)
    assert (r1.action.k, r2.action.k, r2.trainable) == (2, 7, False)
    assert not declared.evidence_written
    assert declare({}).evidence_written


def test_the_default_graph_answers_with_every_agent_absent() -> None:
    from jointrag.data.types import Passage, Question
    from jointrag.graph.context import Recorder
    from jointrag.graph.episode import Episode
    from jointrag.retrieval import build_index

    index = build_index({}, [Passage("1", "Otter", "wet fur"), Passage("2", "Fox", "red fur")])

    class Llm:
        async def search(self, queries: tuple[str, ...], n: int) -> Any:
            return index.search(list(queries), n)

    declared = declare({})
    episode = Episode(Question("x", "red fox?", ("Fox",)), 0)
    modes = dict.fromkeys(declared.names, "default")
    context = RagContext(Llm(), index, Recorder(episode), modes)  # type: ignore[arg-type]
    final = asyncio.run(declared.graph.ainvoke(initial("red fox?"), context=context))
    assert (final["answer"], final["hop"], final["queries"]) == ("Fox", 1, ["red fox?"])
    assert [d.agent for d in episode.decisions] == ["rewriter", "retriever", "filter", "rewriter", "answerer"]


def test_a_users_agent_comes_from_the_named_file(plugin: Path) -> None:
    graph = yaml.safe_load("""
        state: {summary: {merge: replace}}
        nodes:
          retriever: {type: retriever}
          summariser: {type: fake_agents.Summariser}
          rerank: {type: fake_agents.Noted, top: 5, anything: goes}
          answerer: {type: answerer}
        edges: {START: retriever, retriever: summariser, summariser: rerank, rerank: answerer, answerer: END}
    """)
    declared = declare(graph, [plugin])
    assert declared.names == ["retriever", "summariser", "rerank", "answerer"]
    rerank: Any = declared.agents[2]
    assert (rerank.top, rerank.others) == (5, {"anything": "goes"})
    assert {*RagState.__annotations__, "summary"} <= set(declared.builder.channels)


def test_a_registered_class_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(Rewriter):
        pass

    monkeypatch.setitem(NODES, "mine", Rewriter)
    register("mine", Mine)
    declared = declare({"nodes": {"a": {"type": "mine"}}, "edges": {"START": "a", "a": "END"}})
    assert type(declared.agents[0]) is Mine


@pytest.mark.parametrize("name", sorted(NODES))
def test_every_registered_type_builds_with_its_defaults(name: str) -> None:
    from jointrag.agents.registry import build_agent

    agent = build_agent("some-name", {"type": name}, {}, "graph.nodes.some-name")
    assert isinstance(agent, Agent) and agent.name == "some-name"


SUB = """
extends: {extends}
plugins: [fake_agents.py]
graph:
  state: {{notes: {{merge: append}}, inner: {{merge: replace}}}}
  nodes:
    s: {{type: fake_agents.Search}}
    t: {{type: function, call: fake_agents.step, name: t}}
  edges: {{START: s, s: t, t: END}}
"""


def outer(path: Path) -> dict[str, Any]:
    return {
        "state": {"notes": {"merge": "append"}},
        "nodes": {**steps("a", "z"), "sub": {"type": "subgraph", "config": str(path)}},
        "edges": {"START": "a", "a": "sub", "sub": "z", "z": "END"},
    }


def test_a_subgraph_receives_the_state_and_gives_back_only_what_it_changed(plugin: Path) -> None:
    path = plugin.parent / "sub.yaml"
    path.write_text(SUB.format(extends="demo"), encoding="utf-8")
    script = {
        "a": {"queries": ["one"], "notes": "A", "evidence": ["e"]},
        "s": {"queries": ["two"]},
        "t": {"notes": ["T"], "inner": 3},
    }
    declared = built(outer(path), plugin, script)
    assert declared.names == ["s"]
    assert list(declared.functions) == ["a", "z", "sub.t"]
    final, calls = run(declared)
    assert order(calls) == ["a", "s", "t", "z"]
    assert calls[1][1]["queries"] == ["one"] and calls[1][1]["notes"] == ["A"]
    assert calls[2][1]["queries"] == ["one", "two"] and calls[2][1]["hop"] == 1
    assert calls[3][1]["queries"] == ["one", "two"]  # not one, one, two
    assert (final["notes"], final["evidence"], final["hop"], "inner" in final) == (["A", "T"], ["e"], 1, False)


def test_a_subgraph_in_a_parallel_branch_meets_its_sibling(plugin: Path) -> None:
    path = plugin.parent / "sub.yaml"
    path.write_text(SUB.format(extends="demo"), encoding="utf-8")
    graph = outer(path)
    graph["edges"] = {"START": ["a", "sub"], "a": "z", "sub": "z", "z": "END"}
    final, calls = run(built(graph, plugin, {"a": {"queries": ["A"]}, "t": {"queries": ["T"]}}))
    assert sorted(order(calls)) == ["a", "s", "t", "z"]
    assert sorted(final["queries"]) == ["A", "T"]


def test_a_subgraph_carries_context_and_records_in_order(plugin: Path) -> None:
    path = plugin.parent / "sub.yaml"
    path.write_text("nodes: {reader: {type: answerer}}\nedges: {START: reader, reader: END}\n", encoding="utf-8")
    graph = {
        "nodes": {"rewriter": {"type": "rewriter"}, "sub": {"type": "subgraph", "config": str(path)}},
        "edges": {"START": "rewriter", "rewriter": "sub", "sub": "END"},
    }
    from jointrag.data.types import Question
    from jointrag.graph.context import Recorder
    from jointrag.graph.episode import Episode

    declared = declare(graph)
    assert declared.names == ["rewriter", "reader"]
    episode = Episode(Question("x", "q", ("a",)), 0)
    context = RagContext(None, None, Recorder(episode), dict.fromkeys(declared.names, "default"))  # type: ignore[arg-type]
    final = asyncio.run(declared.graph.ainvoke(initial("q"), context=context))
    assert final["answer"] == "unknown"
    assert [(d.agent, d.step) for d in episode.decisions] == [("rewriter", 0), ("reader", 1)]
    assert "reader" in declared.mermaid()  # opened in the drawing


# --- drawing, limits, settings of agents ------------------------------------------------------------------------------


def test_mermaid_shows_every_node_and_what_decides(plugin: Path) -> None:
    drawing = declare({}).mermaid()
    for part in (
        "graph TD",
        "rewriter(rewriter)",
        "wants_search",
        "else",
        "filter --> rewriter",
        "answerer --> __end__",
    ):
        assert part in drawing
    assert "each of pending" in built(SEND, plugin).mermaid()


def test_the_recursion_limit_grows_with_the_rounds_a_graph_may_have() -> None:
    config = load_config("demo")
    assert recursion_limit(config) < recursion_limit(load_config("demo", ["graph.max_hops=9"]))
    edge = "graph.edges.rewriter.if={all: [wants_search, {hop_below: {n: 40}}]}"
    assert recursion_limit(load_config("demo", [edge])) > 40 * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "agents.filtr.mode=frozen",
            r"agents\.filtr: got 'filtr', expected an agent of this graph.*Did you mean 'filter'",
        ),
        ("rewards.process.rerank=[{type: f1}]", r"rewards\.process\.rerank: got 'rerank'"),
        ("llm.heads={a: [rewriter, retriever, filter, answrer]}", r"llm\.heads: got 'answrer'"),
        (
            "llm.heads={filter: [rewriter, retriever]}",
            r"llm\.heads: got a head 'filter' without the agent of that name",
        ),
        ("llm.heads={a: [rewriter, retriever], b: [filter, answerer, rewriter]}", "'rewriter' under two heads"),
        ("agents.filter.prompt=nowhere.txt", r"graph\.nodes\.filter: prompt file 'nowhere.txt' cannot be read"),
        ("agents.fliter.prompt=nowhere.txt", r"agents\.fliter: got 'fliter'"),
    ],
)
def test_settings_of_agents_that_do_not_fit_the_graph_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare_config(load_config("demo", [override]))


def test_a_head_map_may_leave_agents_to_heads_of_their_own() -> None:
    declare_config(load_config("demo", ["llm.heads={retrieval: [rewriter, filter], answerer: [answerer]}"]))


@pytest.mark.parametrize("parent", [{}, {"extends": "demo"}], ids=["defaults", "parent"])
def test_what_parents_say_of_agents_that_a_graph_lacks_is_no_fault(parent: dict[str, str]) -> None:
    nodes = {"retriever": {"type": "retriever"}, "answerer": {"type": "answerer"}}
    graph = {"nodes": nodes, "edges": {"START": "retriever", "retriever": "answerer", "answerer": "END"}}
    config = load_config({**parent, "data": {"world": {}}, "graph": graph})
    assert set(config.rewards.process) == set(declare_config(config).names) == {"retriever", "answerer"}
    own = {"process": {"filter": [{"type": "evidence_f1"}]}}
    with pytest.raises(ConfigError, match=r"process\.filter: got 'filter', expected an agent of this graph"):
        declare_config(load_config({**parent, "data": {"world": {}}, "graph": graph, "rewards": own}))
    with pytest.raises(ConfigError, match=r"agents\.filter: got 'filter'"):
        declare_config(load_config({**parent, "data": {"world": {}}, "graph": graph}, ["agents.filter.lr=0.1"]))


def test_a_prompt_file_of_the_config_reaches_its_agent(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("keep what helps\n", encoding="utf-8")
    (tmp_path / "c.yaml").write_text("extends: demo\nagents: {filter: {prompt: f.txt}}\n", encoding="utf-8")
    agent: Any = declare_config(load_config(tmp_path / "c.yaml")).agents[2]
    assert agent.instruction == "keep what helps"


# --- what is refused --------------------------------------------------------------------------------------------------

A = "a: {type: answerer}"
F = "{type: function, call: fake_agents.step, name: x"
BAD_GRAPHS = {
    "unknown target": (f"nodes: {{{A}}}\nedges: {{START: b, a: END}}", "graph.edges.START: got the unknown target 'b'"),
    "misspelt target": (
        "nodes: {answerer: {type: answerer}}\nedges: {START: anwserer, answerer: END}",
        "Did you mean 'answerer'?",
    ),
    "unknown source": (f"nodes: {{{A}}}\nedges: {{START: a, a: END, b: a}}", "graph.edges.b: got an edge from an unknown"),
    "no START": (f"nodes: {{{A}}}\nedges: {{a: END}}", "got no START, expected where an episode begins; add `START: a`"),
    "edge from END": (f"nodes: {{{A}}}\nedges: {{START: a, a: END, END: a}}", "got an edge from END, expected none"),
    "edge to START": (f"nodes: {{{A}}}\nedges: {{START: a, a: START}}", "got START as a target"),
    "no edge from": (f"nodes: {{{A}}}\nedges: {{START: a}}", "graph.nodes.a: got no edge from it"),
    "unreachable": (f"nodes: {{{A}, b: {F}}}}}\nedges: {{START: a, a: END, b: END}}", "graph.nodes.b: got a node that nothing leads to"),
    "no path to END": (
        "nodes: {a: {type: rewriter}, b: {type: retriever}}\nedges: {START: a, a: b, b: a}",
        "graph.edges.a: got no path from 'a' to END",
    ),
    "no node": ("nodes: {}\nedges: {START: a}", "graph.nodes: got no node"),
    "self loop": (
        f"state: {{v: {{}}}}\nnodes: {{a: {F}}}}}\n"
        "edges: {START: a, a: {if: {field_equals: {key: v, value: 1}}, then: a, else: END}}",
        "got the loop a -> a without a cap",
    ),
    "loop without a cap": (
        f"state: {{v: {{}}}}\nnodes: {{r: {{type: retriever}}, c: {F}}}}}\n"
        "edges: {START: r, r: c, c: {if: fake_agents.is_retry, then: r, else: END}}",
        "without a cap, expected every loop to end; make one of its edges conditional on wants_search or hop_below",
    ),
    "cap on the way out only": (
        "nodes: {w: {type: rewriter}, r: {type: retriever}, e: {type: answerer}}\n"
        "edges: {START: w, w: {if: wants_search, then: e, else: r}, r: w, e: END}",
        "got the loop w -> r -> w without a cap",
    ),
    "cap that something overrules": (
        "nodes: {w: {type: rewriter}, r: {type: retriever}}\n"
        "edges: {START: w, w: {if: {any: [wants_search, {empty: evidence}]}, then: r, else: END}, r: w}",
        "got the loop w -> r -> w without a cap",
    ),
    "loop without a retriever": (
        f"nodes: {{w: {{type: rewriter}}, c: {F}}}}}\nedges: {{START: w, w: {{if: wants_search, then: c, else: END}}, c: w}}",
        "got the loop w -> c -> w without a retriever in it",
    ),
    "retry that asks nobody": (
        f"state: {{v: {{}}}}\nnodes: {{r: {{type: retriever}}, a: {{type: answerer}}, c: {F}}}}}\n"
        "edges: {START: r, r: a, a: c, c: {if: {field_equals: {key: v, value: retry}}, then: a, else: END}}",
        "without a cap",
    ),
    "unknown type": ("nodes: {a: {type: retreiver}}\nedges: {START: a, a: END}", "Did you mean 'retriever'?"),
    "no type": ("nodes: {a: {k: 3}}\nedges: {START: a, a: END}", "graph.nodes.a.type: got None, expected one of rewriter"),
    "unknown parameter": (
        "nodes: {a: {type: retriever, tops: 3}}\nedges: {START: a, a: END}",
        "graph.nodes.a.tops: got an unknown parameter, expected one of k, tau, trainable, prompt",
    ),
    "misspelt parameter": ("nodes: {a: {type: evidence_filter, bugdet: 3}}\nedges: {START: a, a: END}", "Did you mean 'budget'?"),
    "text for a number": ("nodes: {a: {type: retriever, k: five}}\nedges: {START: a, a: END}", "graph.nodes.a.k: got 'five', expected a valid integer"),
    "nothing to retrieve": ("nodes: {a: {type: retriever, k: 0}}\nedges: {START: a, a: END}", "graph.nodes.a.k: got 0, expected a number above 0"),
    "missing parameter": ("nodes: {a: {type: fake_agents.Fragile}}\nedges: {START: a, a: END}", "graph.nodes.a: got no 'size', expected it"),
    "constructor fails": (
        "nodes: {a: {type: fake_agents.Fragile, size: 3}}\nedges: {START: a, a: END}",
        "graph.nodes.a: got RuntimeError while building Fragile: no room",
    ),
    "no plugin file": ("nodes: {a: {type: my_agents.Reranker}}\nedges: {START: a, a: END}", "add `plugins: [my_agents.py]`"),
    "no such class": ("nodes: {a: {type: fake_agents.Sumariser}}\nedges: {START: a, a: END}", "Did you mean 'Summariser'?"),
    "no agent class": ("nodes: {a: {type: fake_agents.NotAnAgent}}\nedges: {START: a, a: END}", "expected a subclass of jointrag.agents.Agent"),
    "function as a type": ("nodes: {a: {type: fake_agents.step}}\nedges: {START: a, a: END}", "write `{type: function, call: fake_agents.step}`"),
    "agent without observe": ("nodes: {a: {type: fake_agents.Silent}}\nedges: {START: a, a: END}", "got Silent without `observe`"),
    "writes without comma": ("nodes: {a: {type: fake_agents.Comma}}\nedges: {START: a, a: END}", 'write ("key",)'),
    "undeclared key": (
        "nodes: {a: {type: fake_agents.Summariser}}\nedges: {START: a, a: END}",
        "Summariser writes 'summary', expected a state key",
    ),
    "function without call": ("nodes: {a: {type: function}}\nedges: {START: a, a: END}", "graph.nodes.a.call: got None"),
    "class as a function": ("nodes: {a: {type: function, call: fake_agents.Search}}\nedges: {START: a, a: END}", "For an agent write `{type: fake_agents.Search}`"),
    "number as a function": ("nodes: {a: {type: function, call: fake_agents.number}}\nedges: {START: a, a: END}", "expected a function that takes the state"),
    "function of nothing": ("nodes: {a: {type: function, call: fake_agents.bare}}\nedges: {START: a, a: END}", "expected `def bare(state)`"),
    "function parameter": ("nodes: {a: {type: function, call: fake_agents.later, nme: x}}\nedges: {START: a, a: END}", "Did you mean 'name'?"),
    "function writes": (f"nodes: {{a: {F}, writes: [anser]}}}}\nedges: {{START: a, a: END}}", "graph.nodes.a.writes: got 'anser'"),
    "writes is no list": (f"nodes: {{a: {F}, writes: answer}}}}\nedges: {{START: a, a: END}}", "write `writes: [answer]`"),
    "name of a state key": ("nodes: {answer: {type: answerer}}\nedges: {START: answer, answer: END}", "got the name of a state key"),
    "name with a dot": ("nodes: {a.b: {type: answerer}}\nedges: {START: a.b, a.b: END}", "expected letters, digits, _ and -"),
    "taken name": ("nodes: {END: {type: answerer}}\nedges: {START: END}", "START and END are taken"),
    "state key clash": (f"state: {{queries: {{merge: replace}}}}\nnodes: {{{A}}}\nedges: {{START: a, a: END}}", "graph.state.queries: got a key that every graph has"),
    "unknown condition": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{if: wants_serch, then: a, else: END}}}}", "graph.edges.a.if: got the unknown condition"),
    "missing else": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{if: wants_search, then: END}}}}", "graph.edges.a: got no 'else' beside 'if'"),
    "misspelt then": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{if: wants_search, than: END, else: END}}}}", "Did you mean 'then'?"),
    "unknown form": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{swich: hop, cases: {{1: a}}, default: END}}}}", "Did you mean 'switch'?"),
    "missing default": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{switch: hop, cases: {{1: END}}}}}}", "got no 'default' beside 'switch'"),
    "cases are a list": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{switch: hop, cases: [a], default: END}}}}", "graph.edges.a.cases: got ['a']"),
    "switch on no key": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{switch: hopp, cases: {{1: END}}, default: END}}}}", "Did you mean 'hop'?"),
    "decides by an unwritten key": (
        f"state: {{v: {{}}}}\nnodes: {{{A}}}\nedges: {{START: a, a: {{switch: v, cases: {{1: END}}, default: END}}}}",
        "graph.edges.a: decides by 'v', which no node before it writes",
    ),
    "send to several": (f"nodes: {{{A}, r: {{type: retriever}}}}\nedges: {{START: a, a: {{send: pending, to: [r], else: END}}, r: END}}", "expected one node that every item goes to"),
    "send to END": (f"nodes: {{{A}}}\nedges: {{START: a, a: {{send: pending, to: END, else: END}}}}", "graph.edges.a.to: got END"),
    "send without else": (f"nodes: {{{A}, r: {{type: retriever}}}}\nedges: {{START: a, a: {{send: pending, to: r}}, r: END}}", "got no 'else' beside 'send'"),
    "send one value": (f"nodes: {{{A}, r: {{type: retriever}}}}\nedges: {{START: a, a: {{send: question, to: r, else: END}}, r: END}}", "which holds one value"),
    "send into one value": (f"nodes: {{w: {{type: rewriter}}, {A}}}\nedges: {{START: w, w: {{send: pending, to: a, else: END}}, a: END}}", "whose branches would all write 'answer' at once"),
    "two writers at once, one node later": (f"nodes: {{one: {{type: answerer}}, two: {{type: answerer}}, a: {F}1}}, b: {F}2}}}}\nedges: {{START: [a, b], a: one, b: two, one: END, two: END}}", "got 'one' and 'two' in one superstep, which both write 'answer'"),
    "two writers at once": (f"nodes: {{{A}, b: {{type: answerer}}}}\nedges: {{START: [a, b], a: END, b: END}}", "got 'a' and 'b' in one superstep, which both write 'answer'"),
    "empty list": (f"nodes: {{{A}}}\nedges: {{START: a, a: []}}", "got an empty list"),
    "same target twice": (f"nodes: {{{A}}}\nedges: {{START: [a, a], a: END}}", "expected different nodes"),
    "target is a number": (f"nodes: {{{A}}}\nedges: {{START: a, a: 3}}", "got the unknown target 3"),
    "filter before retrieval": ("nodes: {f: {type: evidence_filter}, r: {type: retriever}}\nedges: {START: f, f: r, r: END}", "graph.nodes.f: reads 'passages', which no node before it has written"),
    "key read before it is written": (
        "state: {summary: {}}\nnodes: {b: {type: fake_agents.Reader}, s: {type: fake_agents.Noted}}\n"
        "edges: {START: b, b: s, s: END}",
        "graph.nodes.b: reads 'summary', which no node before it has written, expected it to be written first; lead to 'b' through 's'",
    ),
    "key written on one way only": (
        "state: {summary: {}}\nnodes: {w: {type: rewriter}, s: {type: fake_agents.Noted}, b: {type: fake_agents.Reader}}\n"
        "edges: {START: w, w: {if: wants_search, then: s, else: b}, s: b, b: END}",
        "reads 'summary', which not every way to it has written",
    ),
    "key written beside": (
        "state: {summary: {}}\nnodes: {s: {type: fake_agents.Noted}, b: {type: fake_agents.Reader}}\n"
        "edges: {START: [s, b], s: END, b: END}",
        "graph.nodes.b: reads 'summary'",
    ),
    "subgraph without config": ("nodes: {a: {type: subgraph}}\nedges: {START: a, a: END}", "write `config: other_graph.yaml`"),
    "no such subgraph": ("nodes: {a: {type: subgraph, config: x.yaml}}\nedges: {START: a, a: END}", "graph.nodes.a (x.yaml): x.yaml: got no such file"),
    "subgraph parameter": ("nodes: {a: {type: subgraph, config: x.yaml, k: 3}}\nedges: {START: a, a: END}", "graph.nodes.a.k: got an unknown parameter"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_bad_graph_is_refused_with_the_node_and_the_fix(case: str, plugin: Path) -> None:
    text, message = BAD_GRAPHS[case]
    with pytest.raises(GraphError) as refused:
        declare(yaml.safe_load(text), [plugin])
    assert message in str(refused.value)
    assert "graph." in str(refused.value)


GOOD_GRAPHS = {
    "written on both ways": (
        "state: {summary: {}}\nnodes: {w: {type: rewriter}, s: {type: fake_agents.Noted}, t: {type: fake_agents.Noted}, "
        "b: {type: fake_agents.Reader}}\nedges: {START: w, w: {if: wants_search, then: s, else: t}, s: b, t: b, b: END}"
    ),
    "written in one parallel branch": (
        f"state: {{summary: {{}}}}\nnodes: {{s: {{type: fake_agents.Noted}}, f: {F}, writes: []}}, "
        "b: {type: fake_agents.Reader}}\nedges: {START: [s, f], s: b, f: b, b: END}"
    ),
    "written late in one parallel branch": (
        f"state: {{summary: {{}}}}\nnodes: {{s: {{type: fake_agents.Noted}}, f: {F}, writes: []}}, g: {F}, writes: []}}, "
        "b: {type: fake_agents.Reader}}\nedges: {START: [f, g], f: s, s: b, g: b, b: END}"
    ),
    "a list carried round a loop": (
        "state: {summary: {merge: append}}\nnodes: {w: {type: fake_agents.Reader}, r: {type: fake_agents.Search}, "
        "s: {type: fake_agents.Noted}}\n"
        "edges: {START: w, w: {if: {hop_below: 2}, then: r, else: END}, r: s, s: w}"
    ),
    "a function may have written it": (
        f"state: {{summary: {{}}}}\nnodes: {{f: {F}}}, b: {{type: fake_agents.Reader}}}}\nedges: {{START: f, f: b, b: END}}"
    ),
    "a capped retry": (
        f"state: {{v: {{}}}}\nnodes: {{r: {{type: retriever}}, c: {F}}}}}\nedges: {{START: r, r: c, c: {{if: {{all: "
        "[{field_equals: {key: v, value: retry}}, {hop_below: {n: 3}}]}, then: r, else: END}}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD_GRAPHS)
def test_a_sound_graph_is_not_refused(case: str, plugin: Path) -> None:
    declare(yaml.safe_load(GOOD_GRAPHS[case]), [plugin])


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("nodes: {a: {type: answerer}}\nedges: {START: a, a: END}", "got two agents named 'a'"),
        ("nodes: {b: {type: retreiver}}\nedges: {START: b, b: END}", "graph.nodes.s ({path}): graph.nodes.b.type: got 'retreiver'"),
        ("nodes: {s: {type: subgraph, config: sub.yaml}}\nedges: {START: s, s: END}", "got the ring sub.yaml -> sub.yaml"),
        ("state: {notes: {merge: union}}\nnodes: {b: {type: answerer}}\nedges: {START: b, b: END}", "got merge 'union', expected the 'append'"),
        ("nodes: {f: {type: evidence_filter}}\nedges: {START: f, f: END}", "graph.nodes.s: reads 'passages'"),
        ("plugins: [nowhere.py]\nnodes: {b: {type: answerer}}\nedges: {START: b, b: END}", "nowhere.py', which cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_subgraph_is_refused_with_both_places(inner: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sub.yaml"
    path.write_text(inner, encoding="utf-8")
    graph = {
        "state": {"notes": {"merge": "append"}},
        "nodes": {"a": {"type": "answerer"}, "s": {"type": "subgraph", "config": str(path)}},
        "edges": {"START": "s", "s": "a", "a": "END"},
    }
    with pytest.raises(GraphError) as refused:
        declare(graph)
    assert message.format(path=path) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("broken_one.py", "x = (\n", r"got SyntaxError while importing .*broken_one\.py, line 1"),
        ("failing_one.py", "\n\n1 / 0\n", r"got ZeroDivisionError while importing .*failing_one\.py, line 3"),
        ("leaving_one.py", "raise SystemExit(3)\n", r"got SystemExit while importing"),
        ("lacking_one.py", "import no_such_module_at_all\n", r"got ModuleNotFoundError while importing .*line 1"),
        ("json.py", "", r"whose name 'json' belongs to another module"),
        ("pydantic.py", "", r"whose name 'pydantic' belongs to another module"),
        ("my-agents.py", "", r"expected a Python file such as my_agents\.py"),
        ("agents.txt", "", r"expected a Python file such as my_agents\.py"),
    ],
)
def test_a_bad_plugin_file_is_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        declare({}, [path])
    assert path.stem not in sys.modules or path.stem in ("json", "pydantic")


def test_plugin_files_are_told_apart_by_path_and_read_anew_when_they_change(tmp_path: Path) -> None:
    graph = {"nodes": {"a": {"type": "twice_named.A"}}, "edges": {"START": "a", "a": "END"}}
    text = "from jointrag.agents import Answerer\nclass A(Answerer): size = {}\n"
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice_named.py").write_text(text.format(len(folder) + ord(folder[0])), encoding="utf-8")
    one: Any = declare(graph, [tmp_path / "one" / "twice_named.py"]).agents[0]
    two: Any = declare(graph, [tmp_path / "two" / "twice_named.py"]).agents[0]
    again: Any = declare(graph, [tmp_path / "one" / "twice_named.py"]).agents[0]
    assert one.size != two.size and type(again) is type(one)
    (tmp_path / "one" / "twice_named.py").write_text(text.format(7), encoding="utf-8")
    assert declare(graph, [tmp_path / "one" / "twice_named.py"]).agents[0].size == 7  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="got two files named 'twice_named'"):
        declare(graph, [tmp_path / "one" / "twice_named.py", tmp_path / "two" / "twice_named.py"])
    with pytest.raises(
        ConfigError, match=r"which cannot be read.*relative to the config.*Did you mean 'twice_named.py'"
    ):
        declare(graph, [tmp_path / "one" / "twice_name.py"])

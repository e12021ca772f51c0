from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jointrag.configs.load import dump_config, load_config, load_graph, read_yaml
from jointrag.data.errors import ConfigError

WORLD = "data: {world: {}}\n"


def write(folder: Path, **files: str) -> Path:
    """Write `name="text"` as name.yaml; return the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.yaml"


# --- what is merged ---------------------------------------------------------------------------------------------------


def test_a_child_holds_only_what_differs_and_a_grandchild_too(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        c="extends: b.yaml\nmarl: {updates: 3}\nrewards: {team: [{type: em, weight: 2}]}\n",
        b="extends: a.yaml\nmarl: {updates: 7, epochs: 5}\nagents: {filter: {lr: 0.5}}\n",
        a=WORLD + "seed: 4\nmarl: {gamma: 0.5}\nagents: {filter: {mode: frozen}, rewriter: {lr: 2}}\n",
    )
    config = load_config(path)
    assert (config.seed, config.marl.updates, config.marl.epochs, config.marl.gamma) == (4, 3, 5, 0.5)
    assert (config.agent("filter").lr, config.agent("filter").mode_name, config.agent("rewriter").lr) == (
        0.5,
        "frozen",
        2,
    )
    assert config.rewards.team == [{"type": "em", "weight": 2}]  # a list replaces
    assert set(config.rewards.process) == {"rewriter", "retriever", "filter", "answerer"}  # the defaults stay


def test_a_parent_is_found_beside_its_child_and_else_among_the_shipped(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = write(tmp_path / "sub", c="extends: ../a.yaml\n")
    write(tmp_path, a="extends: demo\nseed: 9\n")
    config = load_config(path)
    assert (config.seed, config.out) == (9, "runs/demo")


def test_data_merges_within_the_world_and_is_replaced_by_files(tmp_path: Path) -> None:
    base = "data: {world: {seed: 5, passages: 700}}\n"
    path = write(tmp_path, more="extends: base.yaml\ndata: {world: {passages: 900}}\n", base=base)
    world = load_config(path).data.world
    assert world is not None and (world.seed, world.passages) == (5, 900)
    path = write(tmp_path, files="extends: base.yaml\ndata: {corpus: c.jsonl, train: t.jsonl}\n", base=base)
    data = load_config(path).data
    assert (data.world, data.corpus, data.train) == (None, "c.jsonl", "t.jsonl")


def test_another_index_type_brings_its_own_keys(tmp_path: Path) -> None:
    path = write(tmp_path, a="extends: b.yaml\nindex: {type: dense}\n", b=WORLD + "index: {type: bm25, b: 0.5}\n")
    assert load_config(path).index == {"type": "dense"}
    path = write(tmp_path, a="extends: b.yaml\nindex: {candidates: 9}\n", b=WORLD + "index: {type: bm25, b: 0.5}\n")
    assert load_config(path).index == {"type": "bm25", "b": 0.5, "candidates": 9}


def test_nodes_alone_change_single_nodes_of_the_default_graph() -> None:
    graph = load_config(
        {"graph": {"nodes": {"filter": {"budget": 2}, "retriever": {"type": "my.R"}}}}, need_data=False
    ).graph
    assert graph.nodes["filter"] == {"type": "evidence_filter", "budget": 2}
    assert graph.nodes["retriever"] == {"type": "my.R"}  # another type does not inherit k
    assert set(graph.nodes) == {"rewriter", "retriever", "filter", "answerer"}


def test_edges_with_a_start_are_a_whole_graph_and_without_one_a_patch(tmp_path: Path) -> None:
    base = WORLD + (
        "graph: {nodes: {a: {type: answerer}, b: {type: answerer}}, "
        "edges: {START: a, a: {if: x, then: b, else: END}, b: END}}\n"
    )
    whole = "extends: base.yaml\ngraph: {nodes: {c: {type: answerer}}, edges: {START: c, c: END}}\n"
    graph = load_config(write(tmp_path, whole=whole, base=base)).graph
    assert (graph.nodes, graph.edges) == ({"c": {"type": "answerer"}}, {"START": "c", "c": "END"})
    patch = "extends: base.yaml\ngraph: {nodes: {b: null}, edges: {a: END, b: null}}\n"
    graph = load_config(write(tmp_path, patch=patch, base=base)).graph
    assert (graph.nodes, graph.edges) == ({"a": {"type": "answerer"}}, {"START": "a", "a": "END"})


def test_a_graph_without_a_parent_takes_nothing_from_the_default_graph() -> None:
    graph = load_config({"graph": {"nodes": {"a": {"type": "answerer"}}, "edges": {"a": "END"}}}, need_data=False).graph
    assert (set(graph.nodes), graph.edges) == ({"a"}, {"a": "END"})


def test_null_gives_the_default_back_and_braces_clear(tmp_path: Path) -> None:
    base = WORLD + "marl: {updates: 7}\nllm: {lora: {r: 4}}\nout: runs/x\n"
    child = "extends: base.yaml\nmarl:\nllm: {lora: {r: null}}\nout:\nrewards: {process: {}}\n"
    config = load_config(write(tmp_path, child=child, base=base))
    assert (config.marl.updates, config.llm.lora.r, config.out, config.rewards.process) == (30, 16, "runs/run", {})
    assert load_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=3", "seed", 3),
        ("agents.filter.mode=frozen", "agents.filter.mode", "frozen"),
        ("agents.filter.lr=1e-4", "agents.filter.lr", 1e-4),  # YAML 1.1 would read text
        ("marl.critic={privileged: false}", "marl.critic.privileged", False),
        ("graph.nodes.filter.budget=2", "graph.nodes.filter.budget", 2),
        ("graph.edges.filter=answerer", "graph.edges.filter", "answerer"),
        ("graph.edges.rewriter.else=END", "graph.edges.rewriter.else", "END"),
        ("rewards.process.filter.0.weight=0", "rewards.process.filter.0.weight", 0),
        ("out=runs/a=b", "out", "runs/a=b"),
        ("out=no", "out", "no"),  # YAML 1.1 would read false
        ("data={corpus: c.jsonl}", "data.corpus", "c.jsonl"),
        ("marl.updates=null", "marl.updates", 30),
    ],
)
def test_an_override_sets_one_key(override: str, path: str, value: Any) -> None:
    here: Any = load_config("demo", ["marl.updates=1", override]).model_dump()
    for part in path.split("."):
        here = here[int(part)] if isinstance(here, list) else here[part]
    assert here == value and type(here) is type(value)


def test_files_named_in_a_config_are_relative_to_it_and_data_and_runs_are_not(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    write(tmp_path / "p", base="plugins: [my_agents.py]\nagents: {filter: {prompt: f.txt}}\ndata: {corpus: c.jsonl}\n")
    path = write(
        tmp_path, c="extends: p/base.yaml\nout: runs/x\ngraph: {nodes: {s: {type: subgraph, config: s.yaml}}}\n"
    )
    config = load_config(path)
    assert config.plugins == [str(tmp_path / "p" / "my_agents.py")]
    assert config.agent("filter").prompt == str(tmp_path / "p" / "f.txt")
    assert config.graph.nodes["s"]["config"] == str(tmp_path / "s.yaml")
    assert (config.data.corpus, config.out) == ("c.jsonl", "runs/x")


def test_words_are_words_numbers_are_numbers_and_a_run_folder_is_its_config(tmp_path: Path) -> None:
    path = write(tmp_path, config="a: yes\nb: 1e-3\nc: 2024-01-02\nd: true\ne: 1\nf: .5\ng: off\nh: 12e\n")
    assert read_yaml(path) == {
        "a": "yes",
        "b": 1e-3,
        "c": "2024-01-02",
        "d": True,
        "e": 1,
        "f": 0.5,
        "g": "off",
        "h": "12e",
    }
    path.write_text(WORLD + "seed: 2\n", encoding="utf-8")
    assert load_config(tmp_path).seed == 2


def test_words_that_look_like_numbers_survive_dumping(tmp_path: Path) -> None:
    edges = {
        "START": "a",
        "a": {"switch": "answer", "cases": {"yes": "a", "1e-3": "a", 2: "a", "true": "a"}, "default": "END"},
    }
    config = load_config({"graph": {"nodes": {"a": {"prompt": None}}, "edges": edges}}, need_data=False)
    path = write(tmp_path, c=dump_config(config))
    assert load_config(path, need_data=False).graph.edges == edges


def test_a_file_may_hold_nothing_but_a_graph(tmp_path: Path) -> None:
    path = write(tmp_path, g="nodes: {a: {type: answerer}}\nedges: {START: a, a: END}\nmax_hops: 2\nplugins: [p.py]\n")
    graph, plugins = load_graph(path)
    assert (graph.max_hops, graph.edges, plugins) == (2, {"START": "a", "a": "END"}, [str(tmp_path / "p.py")])


# --- what is refused --------------------------------------------------------------------------------------------------

BAD_FILES = {
    "no data": ("seed: 1\n", "data: got nothing, expected the data to work on; add"),
    "empty": ("", "data: got nothing"),
    "world and files": ("data: {world: {}, corpus: c.jsonl}\n", "either `world` or files, not both"),
    "questions only": ("data: {train: t.jsonl}\n", "a `corpus` beside the question files"),
    "broken YAML": ("seed: [1\nout: x\n", "line 2: got YAML that cannot be read"),
    "tab": ("llm:\n\tmodel: x\n", "line 2: got YAML that cannot be read"),
    "two documents": ("a: 1\n---\nb: 2\n", "got YAML that cannot be read"),
    "python object": ("seed: !!python/object/apply:os.getcwd []\n", "got YAML that cannot be read"),
    "a list": ("- a\n", "expected a mapping such as `seed: 0`"),
    "key twice": ("seed: 1\nout: x\nseed: 2\n", "line 3: got the key 'seed' twice (first on line 1)"),
    "node twice": (
        "graph:\n  nodes:\n    a: {type: answerer}\n    a: {type: rewriter}\n",
        "line 4: got the key 'a' twice",
    ),
    "contains itself": ("graph: &g\n  nodes: *g\n", "contains itself"),
    "unknown key": (WORLD + "retriver: {}\n", "retriver: got an unknown key"),
    "unknown parent key": ("extend: b.yaml\n", "Did you mean 'extends'?"),
    "number as key": (WORLD + "3: 4\n", "3: got"),
    "nested unknown": (WORLD + "marl: {critic: {priviledged: true}}\n", "Did you mean 'privileged'?"),
    "unknown knob": ("data: {world: {twin: 0.1}}\n", "data.world.twin: got an unknown key"),
    "knob out of range": ("data: {world: {passages: 3}}\n", "data.world.passages: got 3, expected"),
    "text for a number": (WORLD + "seed: zero\n", "seed: got 'zero', expected a valid integer"),
    "truth for a number": (WORLD + "seed: true\n", "seed: got True, expected a valid integer"),
    "not finite": (WORLD + "marl: {clip: .nan}\n", "marl.clip: got nan, expected"),
    "negative": (WORLD + "marl: {episodes_per_update: -1}\n", "marl.episodes_per_update: got -1, expected greater"),
    "no mapping": (WORLD + "marl: mappo\n", "marl: got 'mappo', expected"),
    "unknown activation": (WORLD + "llm: {activation: later}\n", "Did you mean 'late'?"),
    "unknown heads": (WORLD + "llm: {heads: seperate}\n", "Did you mean 'separate'?"),
    "heads without list": (
        WORLD + "llm: {heads: {a: rewriter}}\n",
        "llm.heads: got {'a': 'rewriter'}, expected a list",
    ),
    "unknown mode": (WORLD + "agents: {filter: {mode: frosen}}\n", "Did you mean 'frozen'?"),
    "swap without path": (WORLD + "agents: {filter: {mode: {swap: }}}\n", "agents.filter.mode: got"),
    "unknown merge": (
        WORLD + "graph: {state: {s: {merge: add}}}\n",
        "graph.state.s.merge: got 'add', expected 'replace'",
    ),
    "node is no mapping": (WORLD + "graph: {nodes: {a: answerer}}\n", "graph.nodes.a: got 'answerer'"),
    "unknown form": (WORLD + "warm_start: {forms: titles}\n", "Did you mean 'title'?"),
    "process is no list": (WORLD + "rewards: {process: {filter: {type: x}}}\n", "rewards.process.filter: got"),
    "missing parent": ("extends: nowhere.yaml\n", "extends: "),
    "parent is itself": ("extends: c.yaml\n", "got the ring c.yaml -> c.yaml"),
    "parent is a list": ("extends: [a.yaml]\n", "extends: got ['a.yaml'], expected one file name"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[case]
    with pytest.raises(ConfigError) as refused:
        load_config(write(tmp_path, c=text))
    assert message in str(refused.value)
    assert "c.yaml" in str(refused.value)  # the file is named


def test_the_file_that_gave_a_wrong_value_is_the_one_named(tmp_path: Path) -> None:
    path = write(tmp_path, child="extends: base.yaml\nmarl: {epochs: 3}\n", base=WORLD + "marl: {updates: many}\n")
    with pytest.raises(ConfigError, match=r"base\.yaml: marl\.updates: got 'many'"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"^override 'marl\.epochs=x': marl\.epochs: got 'x'"):
        load_config(path, ["marl.updates=1", "marl.epochs=x"])


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(write(tmp_path, c=WORLD + "seed: x\nmarl: {clipp: 1}\n"))
    assert len(str(refused.value).splitlines()) == 2


def test_a_ring_of_parents_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, a="extends: b.yaml\n", b="extends: c.yaml\n", c="extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"got the ring a\.yaml -> b\.yaml -> c\.yaml -> a\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "got no `key=value`"),
        ("=3", "got no `key=value`"),
        ("marl..clip=3", "got no `key=value`"),
        ("out.x=1", "got 'runs/demo' at out, expected a mapping"),
        ("marl.updtes=1", "Did you mean 'updates'?"),
        ("seed=[", "got YAML that cannot be read"),
        ("rewards.process.filter.7.weight=1", "expected a number below 1"),
    ],
)
def test_a_bad_override_is_refused_and_quoted(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("demo", [override])
    assert message in str(refused.value) and override in str(refused.value)


def test_missing_files_wrong_names_folders_and_bytes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, mine=WORLD)
    with pytest.raises(ConfigError, match=r"no such file.*Did you mean 'mine\.yaml'"):
        load_config(tmp_path / "mind.yaml")
    with pytest.raises(ConfigError, match=r"shipped demo, .*Did you mean 'demo'"):
        load_config("demos")
    with pytest.raises(ConfigError, match=r"folder without config\.yaml"):
        load_config(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match=r"no UTF-8"):
        load_config(tmp_path / "b.yaml")

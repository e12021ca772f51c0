from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jointrag.configs.load import dump_config, load_config, shipped
from jointrag.configs.schema import Config, Swap
from jointrag.graph.declare import declare_config

INTERFACE = """
seed: 0
data:
  world: {seed: 11, passages: 2000}
index: {type: bm25, candidates: 20, vectors: svd}
llm:
  model: tiny
  activation: late
  lora: {r: 16, alpha: 32}
  heads: separate
  dtype: auto
  max_context: 512
graph:
  state: {summary: {merge: replace}}
  max_hops: 3
  nodes:
    rewriter:  {type: rewriter, max_queries: 2}
    retriever: {type: retriever, k: 5}
    filter:    {type: evidence_filter, budget: 4}
    answerer:  {type: answerer}
  edges:
    START: rewriter
    rewriter: {if: wants_search, then: retriever, else: answerer}
    retriever: filter
    filter: rewriter
    answerer: END
agents:
  rewriter: {mode: learn, lr: 1.0e-3, temperature: 1.0, kl: {beta: 0.05, target: 0.1}, entropy: 0.005}
  filter: {mode: frozen}
rewards:
  team: [{type: f1, weight: 1.0}, {type: no_answer, weight: -0.1}]
  process:
    rewriter: [{type: retrieval_gain, weight: 0.3}, {type: stop_timing, weight: 0.2},
               {type: search_cost, weight: {from: 0.0, to: 0.02, episodes: 2000}}]
    retriever: [{type: recall_gain, weight: 0.3}]
    filter: [{type: evidence_f1, weight: 0.3}]
    answerer: [{type: grounded, weight: 0.1}]
  format: -0.2
warm_start: {questions: 1000, steps: 80, forms: auto}
marl:
  algorithm: mappo
  credit: team_gae
  critic: {privileged: true}
  updates: 30
  episodes_per_update: 128
  epochs: 2
  gamma: 1.0
  gae_lambda: 0.95
  clip: 0.2
eval: {every: 5, questions: 200, test_questions: 600, bootstrap: 10000}
out: runs/demo
"""


def leaves(tree: object, at: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """Return path -> value of everything below nested mappings."""
    if not isinstance(tree, dict) or not tree:
        return {at: tree}
    return {path: value for key, sub in tree.items() for path, value in leaves(sub, (*at, str(key))).items()}


def test_the_config_of_the_interface_parses_and_every_key_of_it_arrives() -> None:
    raw = yaml.safe_load(INTERFACE)
    arrived = leaves(load_config(raw).model_dump(mode="json"))
    for path, value in leaves(raw).items():
        assert arrived[path] == value, path
    assert load_config(raw).agent("filter").mode_name == "frozen"


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_parses_compiles_and_survives_dumping(name: str) -> None:
    config = load_config(name)
    assert config.data.given
    declared = declare_config(config)
    assert "answerer" in declared.names
    assert declared.mermaid().startswith("---")
    assert load_config(yaml.safe_load(dump_config(config))) == config


def test_a_mode_is_a_name_or_a_swap() -> None:
    config = load_config({"agents": {"filter": {"mode": {"swap": "runs/a/heads/filter"}}}}, need_data=False)
    assert config.agent("filter").mode == Swap(swap="runs/a/heads/filter")
    assert config.agent("filter").mode_name == "swap"
    assert config.agent("rewriter").mode_name == "learn"


def test_two_configs_share_no_mutable_default() -> None:
    one, other = Config(), Config()
    one.graph.nodes["rewriter"]["max_queries"] = 9
    one.rewards.team.clear()
    assert other.graph.nodes["rewriter"]["max_queries"] == 2
    assert len(other.rewards.team) == 2


def test_reading_a_config_imports_no_torch_no_langgraph_and_no_numpy(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(INTERFACE, encoding="utf-8")
    code = (
        "import sys; before = set(sys.modules)\n"
        "from jointrag.configs.load import dump_config, load_config\n"
        f"dump_config(load_config({str(path)!r}, ['marl.updates=2'])); load_config('demo')\n"
        "print(sorted({'torch', 'langgraph', 'transformers', 'faiss', 'numpy'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

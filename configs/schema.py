"""Config: everything a run is told, with every key and every default in one place (interface.md).

Reading a config imports no torch. `index`, reward terms, nodes and edges stay raw here: they are checked by the code
that builds them (`retrieval.build`, `rewards`, `graph.declare`), each against its own spec.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jointrag.data.errors import nearest
from jointrag.data.world import WorldSpec

MODE_NAMES = ("learn", "frozen", "trunk", "warm", "default", "oracle")
VARIANTS = ("vanilla", "trunk", "before", "sft_more", "after", "ceiling", "oracle")  # and without_<agent>
FORM_NAMES = ("auto", "question", "title", "question_title")

DEFAULT_NODES: dict[str, dict[str, Any]] = {
    "rewriter": {"type": "rewriter", "max_queries": 2},
    "retriever": {"type": "retriever", "k": 5},
    "filter": {"type": "evidence_filter", "budget": 4},
    "answerer": {"type": "answerer"},
}
DEFAULT_EDGES: dict[str, Any] = {
    "START": "rewriter",
    "rewriter": {"if": "wants_search", "then": "retriever", "else": "answerer"},
    "retriever": "filter",
    "filter": "rewriter",
    "answerer": "END",
}
DEFAULT_TEAM: list[dict[str, Any]] = [{"type": "f1", "weight": 1.0}, {"type": "no_answer", "weight": -0.1}]
DEFAULT_PROCESS: dict[str, list[dict[str, Any]]] = {
    "rewriter": [
        {"type": "retrieval_gain", "weight": 0.3},
        {"type": "stop_timing", "weight": 0.2},
        {"type": "search_cost", "weight": {"from": 0.0, "to": 0.02, "episodes": 2000}},
    ],
    "retriever": [{"type": "recall_gain", "weight": 0.3}],
    "filter": [{"type": "evidence_f1", "weight": 0.3}],
    "answerer": [{"type": "grounded", "weight": 0.1}],
}


class Section(BaseModel):
    """Unknown keys, wrong types (no silent "3" -> 3) and NaN are refused; a parsed config does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataConfig(Section):
    """The built-in world, or files; dev chooses checkpoints and settings and is never reported."""

    world: WorldSpec | None = None
    corpus: str | None = None
    train: str | None = None
    dev: str | None = None
    test: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        files = [name for name in ("corpus", "train", "dev", "test") if getattr(self, name) is not None]
        if self.world is not None and files:
            raise ValueError(f"either `world` or files, not both; remove `world`, or {', '.join(files)}")
        if files and self.corpus is None:
            raise ValueError("a `corpus` beside the question files; add `corpus: corpus.jsonl`")
        return self

    @property
    def given(self) -> bool:
        """True where the config names any data."""
        return self.world is not None or self.corpus is not None


class LoraConfig(Section):
    """Size of one head."""

    r: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)


class LlmConfig(Section):
    """The frozen trunk and the heads on it."""

    model: str = Field(default="tiny", min_length=1)  # the shipped trunk, or a folder, or a hub name
    activation: Literal["late", "everywhere"] = "late"
    lora: LoraConfig = LoraConfig()
    heads: Literal["separate", "shared"] | dict[str, list[str]] = "separate"  # a map: head -> its agents
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: int = Field(default=512, ge=16)  # tokens; whole passages are dropped from the end, counted
    max_batch: int = Field(default=128, ge=1)  # rows of one forward

    @field_validator("heads", mode="before")
    @classmethod
    def _heads(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for head, agents in value.items():
                if not isinstance(head, str) or not isinstance(agents, list) or not agents:
                    raise ValueError(f"a list of agents for each head, as in {{{head}: [rewriter, filter]}}")
        elif value not in ("separate", "shared"):
            raise ValueError(
                f"separate, shared, or a map such as {{retrieval: [rewriter, filter], answerer: [answerer]}}."
                f"{nearest(str(value), ('separate', 'shared'))}"
            )
        return value


class StateKey(Section):
    """An extra key of the state and how writes to it merge (append and union start as an empty list)."""

    merge: Literal["replace", "append", "union", "max"] = "replace"


class GraphConfig(Section):
    """Nodes, edges and extra state keys; checked as a whole by `graph.declare`."""

    state: dict[str, StateKey] = {}
    max_hops: int = Field(default=3, ge=1)  # search rounds an episode may have
    nodes: dict[str, dict[str, Any]] = Field(default_factory=lambda: copy.deepcopy(DEFAULT_NODES))
    edges: dict[str, Any] = Field(default_factory=lambda: copy.deepcopy(DEFAULT_EDGES))


class Swap(Section):
    """Mode of an agent that acts by another head."""

    swap: str = Field(min_length=1)  # folder of the head, relative to the working directory


class KlConfig(Section):
    """k3 penalty towards the warm-started head; beta moves so that the KL stays near `target`."""

    beta: float = Field(default=0.05, ge=0)  # 0 = off
    target: float = Field(default=4.0, gt=0)  # nats a decision: a new form of query is worth several
    floor: float = Field(default=0.03, ge=0)  # beta never falls below it


class AgentConfig(Section):
    """How one agent acts and learns."""

    mode: Literal["learn", "frozen", "trunk", "warm", "default", "oracle"] | Swap = "learn"
    lr: float = Field(default=1.0e-3, gt=0)
    projection_lr: float = Field(
        default=4.0e-4, gt=0
    )  # of a retriever's projection: 5e-3 destroys the ordering in one step
    temperature: float = Field(default=1.0, gt=0)  # of sampling in training
    kl: KlConfig = KlConfig()
    entropy: float = Field(default=0.005, ge=0)  # weight of the entropy bonus
    clip: float | None = Field(default=None, gt=0)  # None = marl.clip
    interval: int = Field(default=1, ge=1)  # the head steps every this many updates
    prompt: str | None = None  # instruction file, relative to the config; None = the role's own

    @field_validator("mode", mode="before")
    @classmethod
    def _mode(cls, value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"swap"} and isinstance(value["swap"], str) and value["swap"]:
            return value
        if isinstance(value, Swap) or (isinstance(value, str) and value in MODE_NAMES):
            return value
        raise ValueError(f"{', '.join(MODE_NAMES)} or {{swap: path/to/head}}.{nearest(str(value), MODE_NAMES)}")

    @property
    def mode_name(self) -> str:
        """The mode as `RagContext.modes` has it."""
        return "swap" if isinstance(self.mode, Swap) else self.mode


class GuardsConfig(Section):
    """What keeps process rewards from being earned without answering better."""

    answer_in_query: bool = True  # a query that gives away an answer nobody has read earns nothing
    below_value: bool = True  # where the outcome is worse than the critic expected, positive process terms pay half


class RewardsConfig(Section):
    """Weighted terms; each `{type, weight, ...}` is checked by `rewards` when it is built."""

    team: list[dict[str, Any]] = Field(default_factory=lambda: copy.deepcopy(DEFAULT_TEAM))
    process: dict[str, list[dict[str, Any]]] = Field(default_factory=lambda: copy.deepcopy(DEFAULT_PROCESS))
    format: float | dict[str, Any] = -0.2  # malformed output of any agent; scheduled like any weight
    guards: GuardsConfig = GuardsConfig()

    @field_validator("process")
    @classmethod
    def _no_empty_lists(cls, value: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
        return {agent: terms for agent, terms in value.items() if terms}


class WarmStartConfig(Section):
    """Supervised start of every head, from gold passages and answers."""

    questions: int = Field(default=1000, ge=1)  # at most; fewer where the training set is smaller
    steps: int = Field(default=80, ge=0)  # 0 = heads start untrained
    lr: float = Field(default=2.0e-3, gt=0)
    projection_lr: float = Field(default=4.0e-4, gt=0)  # of a retriever's projection
    batch: int = Field(default=48, ge=1)  # rows a step
    forms: Literal["auto", "question", "title", "question_title"] = "auto"  # auto: the form that does best on dev
    run: str | None = None  # a run folder whose warm heads are taken instead, relative to the working directory


class SftMoreConfig(Section):
    """The warm start continued: the comparison that costs at least what joint training costs."""

    steps: int = Field(default=320, ge=0)


class CriticConfig(Section):
    """One head and two outputs: the team's value and the agent's own process reward."""

    privileged: bool = True  # sees gold answer and gold titles, in training only
    lr: float = Field(default=1.0e-3, gt=0)
    clip: float = Field(default=0.5, gt=0)  # of the value's change in an update, in units of the normalised target
    epochs: int = Field(default=1, ge=1)  # passes over the episodes of an update
    warm_up: int = Field(default=4, ge=0)  # passes over one batch of warm-start episodes before the first update


class BudgetConfig(Section):
    """A constraint on searches, kept by a price that rises while there are more."""

    searches: float = Field(gt=0)  # mean queries a question
    rate: float = Field(default=2.0, gt=0)  # of the price, per search too many and update
    ramp: int = Field(default=2, ge=1)  # updates until the limit is down from what the policy does at first
    spare: float = Field(default=0.5, ge=0, lt=1)  # of the plans past it, while it is exceeded: made to ask nothing


class MarlConfig(Section):
    """Joint training."""

    algorithm: str = "mappo"
    credit: str = "team_gae"
    critic: CriticConfig = CriticConfig()
    updates: int = Field(default=30, ge=0)
    episodes_per_update: int = Field(default=128, ge=1)
    group: int = Field(default=1, ge=1)  # episodes of one question; more than 1 for `credit: group_relative`
    epochs: int = Field(default=2, ge=1)
    minibatch: int = Field(default=64, ge=1)  # decisions of one head in one optimiser step, drawn at random
    gamma: float = Field(default=1.0, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip: float = Field(default=0.2, gt=0)
    grad_norm: float = Field(default=1.0, gt=0)
    final_rate: float = Field(default=0.2, gt=0, le=1)  # the learning rates fall linearly to this share
    average: float = Field(default=0.8, ge=0, lt=1)  # decay of the running means that are measured and kept; 0 = off
    normalise: Literal["agent", "all"] = "agent"  # advantages: over each agent's own, or over those of all agents
    std_floor: float = Field(default=0.1, gt=0)  # advantages are divided by no less
    budget: BudgetConfig | None = None  # null: searches are free, or cost what a reward term says
    rollback: int = Field(default=0, ge=0)  # times a run may go back to its best heads when one diverges or collapses

    @model_validator(mode="after")
    def _whole_groups(self) -> MarlConfig:
        if self.episodes_per_update % self.group:
            raise ValueError(f"`group` to divide episodes_per_update ({self.episodes_per_update}); got {self.group}")
        if self.algorithm == "ippo" and (self.budget or self.credit != "team_gae"):
            what = "budget" if self.budget else f"credit ({self.credit})"
            raise ValueError(
                f"`algorithm: mappo` for a {what}: independent learners share no reward to divide and no limit to keep"
            )
        return self


class EvalConfig(Section):
    """When and on how much the pipeline is measured."""

    every: int = Field(default=5, ge=1)  # updates between two looks at dev; under a budget each is looked at
    questions: int = Field(default=200, ge=1)  # of dev, for choosing
    test_questions: int = Field(default=600, ge=1)  # held out, for reporting
    bootstrap: int = Field(default=10_000, ge=1)  # resamples
    variants: list[str] = []  # blocks of eval.json to measure: VARIANTS, without_<agent>; [] = all


class Config(Section):
    """A whole config. Every key but `data` has a default."""

    seed: int = Field(default=0, ge=0)
    data: DataConfig = DataConfig()
    index: dict[str, Any] = Field(default_factory=lambda: {"type": "bm25"})  # defaults: the type's own Spec
    llm: LlmConfig = LlmConfig()
    plugins: list[str] = []  # files with the user's own classes, relative to the config
    graph: GraphConfig = Field(default_factory=GraphConfig)
    agents: dict[str, AgentConfig] = {}
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    warm_start: WarmStartConfig = WarmStartConfig()
    sft_more: SftMoreConfig = SftMoreConfig()
    marl: MarlConfig = MarlConfig()
    eval: EvalConfig = EvalConfig()
    out: str = Field(default="runs/run", min_length=1)  # the run folder, relative to the working directory

    def agent(self, name: str) -> AgentConfig:
        """Return the settings of one agent: the defaults where the config does not mention it."""
        return self.agents.get(name) or AgentConfig()

"""Pipeline: a compiled LangGraph graph, the agents in it that act and learn, one language model, one index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from langgraph.errors import GraphRecursionError

from jointrag.agents.base import Agent
from jointrag.agents.retriever import Retriever
from jointrag.data.errors import ConfigError, JointragError, RetrievalError, nearest
from jointrag.data.types import UNKNOWN, Question
from jointrag.graph.context import MODES, RagContext, Recorder
from jointrag.graph.episode import Episode
from jointrag.graph.state import initial
from jointrag.llm.model import LanguageModel, load_trunk
from jointrag.llm.scheduler import Scheduler, run_sync, stable_seed
from jointrag.retrieval.base import Index

CRITIC = "critic"


def head_map(agents: Sequence[Agent], heads: str | Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return agent -> head for a sharing map: "separate", "shared", or {head: [agents]}."""
    names = [a.name for a in agents if a.trainable]
    if heads in ("separate", "shared"):  # an agent that no head names gets its own
        heads = {"shared": names} if heads == "shared" and names else {}
    if isinstance(heads, str):
        raise ConfigError(f"llm.heads: got {heads!r}; expected separate, shared, or a map from head to agents")
    out: dict[str, str] = {}
    for head, members in heads.items():
        for agent in members:
            if agent not in names:
                raise ConfigError(
                    f"llm.heads.{head}: unknown agent {agent!r}; expected one of {names}.{nearest(agent, names)}"
                )
            if agent in out:
                raise ConfigError(f"llm.heads: agent {agent!r} has two heads, {out[agent]!r} and {head!r}; keep one")
            out[agent] = head
    for n in names:
        out.setdefault(n, n)
    for head in out.values():  # it names a folder of the run, and copies of it are called head@warm
        if head in (CRITIC, ".", "..") or set(head) & set("/\\@") or not head.strip():
            raise ConfigError(
                f"got {head!r} as the name of an agent or a head; expected one without / \\ @, not {CRITIC!r} (the "
                f"critic has that name), '.' or '..': rename it in graph.nodes, in llm.heads, or on the agent"
            )
    return out


def asked(text: str, name: str = "ask") -> Question:
    """Return a question without gold."""
    if not text.strip():
        raise ConfigError("got an empty question; expected some text")
    return Question(name, text, (UNKNOWN,))


class Pipeline:
    """Runs questions through a graph. `agents` names the trained ones: nothing is guessed.

    graph: a compiled LangGraph graph with `context_schema=RagContext`. llm: "tiny", a folder, a hub name, or a
    LanguageModel. index: an Index, or a folder written by `jointrag index build`. heads: separate, shared, or a map.
    """

    def __init__(
        self,
        graph: Any,
        agents: Sequence[Agent],
        llm: str | LanguageModel = "tiny",
        index: str | Path | Index = "",
        *,
        heads: str | Mapping[str, Sequence[str]] = "separate",
        activation: str = "late",
        lora: Mapping[str, int] | None = None,
        max_hops: int = 3,
        max_context: int = 512,
        max_batch: int = 128,
        dtype: str = "auto",
        seed: int = 0,
        temperature: Mapping[str, float] | None = None,
        evidence_written: bool | None = None,
        recursion_limit: int | None = None,
    ) -> None:
        names = [a.name for a in agents]
        if len(set(names)) != len(names) or not all(names):
            raise ConfigError(f"agents: got names {names}; expected distinct, non-empty ones: set `name` on each agent")
        self.graph, self.agents, self.max_hops = graph, list(agents), max_hops
        self.recursion_limit = recursion_limit or 8 * (max_hops + 2) + 4 * len(agents)
        if not isinstance(index, Index):
            from jointrag.retrieval.store import open_index

            index = open_index(index)
        self.index = index
        self.head_of = head_map(agents, heads)
        if isinstance(llm, str):
            from jointrag.llm.heads import Heads

            trunk, tokenizer, path = load_trunk(llm, dtype)
            lora = {"r": 16, "alpha": 32, **(lora or {})}
            llm = LanguageModel(
                trunk, tokenizer, Heads(trunk, lora["r"], lora["alpha"], path, activation, seed), max_context, max_batch
            )
        self.llm = llm
        hidden = int(llm.trunk.get_input_embeddings().weight.shape[1])
        for head in dict.fromkeys(self.head_of.values()):
            ranks = any(isinstance(a, Retriever) for a in agents if self.head_of.get(a.name) == head)
            llm.heads.add(head, {"projection": (index.dim, hidden)} if ranks else None)
        llm.heads.add(CRITIC, {"value": (2, hidden), "bias": (2,)})
        self.instructions = {a.name: str(getattr(a, "instruction", "")) for a in agents}
        self.fingerprint = llm.template.fingerprint(self.instructions)
        self.temperature = dict(temperature or {})
        self.modes: dict[str, str] = {}  # how agents act where a call does not say: those a run holds in a mode
        self.evidence_written = (
            any("evidence" in a.writes for a in agents) if evidence_written is None else evidence_written
        )

    def acting_by(self, head: str) -> list[str]:
        """Return the agents that act by a head."""
        return [a for a, h in self.head_of.items() if h == head]

    def fingerprint_of(self, head: str) -> str:
        """Return the fingerprint that travels with a head: of the template and the prompts of its own agents."""
        return self.llm.template.fingerprint({a: self.instructions[a] for a in self.acting_by(head)})

    def agent(self, name: str) -> Agent:
        """Return an agent by name."""
        for a in self.agents:
            if a.name == name:
                return a
        names = [a.name for a in self.agents]
        raise ConfigError(f"unknown agent {name!r}; expected one of {names}.{nearest(name, names)}")

    def check_modes(self, modes: Mapping[str, str] | None) -> dict[str, str]:
        """Return `modes` over the pipeline's own, after refusing unknown agents and modes."""
        modes = {**self.modes, **(modes or {})}
        for name, mode in modes.items():
            self.agent(name)
            if mode not in MODES:
                raise ConfigError(f"agents.{name}.mode: got {mode!r}; expected one of {MODES}.{nearest(mode, MODES)}")
            head = {"warm": f"{self.head_of.get(name)}@warm", "swap": f"{name}@swap"}.get(mode)
            if head and name in self.head_of and head not in self.llm.heads.names:
                how = "train it or load a trained run" if mode == "warm" else "write {swap: path/to/head} in the config"
                raise ConfigError(f"agents.{name}.mode: got {mode!r} without a head {head!r}; expected one: {how}")
        return modes

    def _context(self, scheduler: Scheduler, question: Question, seed: int, **options: Any) -> RagContext:
        return RagContext(
            llm=scheduler,
            index=self.index,
            recorder=Recorder(Episode(question, seed)),
            seed=seed,
            gold=question,
            max_hops=self.max_hops,
            evidence_written=self.evidence_written,
            **options,
        )

    def _config(self) -> dict[str, Any]:
        return {"recursion_limit": self.recursion_limit}

    def scheduler(self) -> Scheduler:
        """Return a scheduler for one event loop."""
        return Scheduler(self.llm, self.index, self.head_of, self.temperature)

    async def _episode(
        self, scheduler: Scheduler, question: Question, seed: int, options: Mapping[str, Any]
    ) -> Episode:
        context = self._context(scheduler, question, seed, **options)
        episode = context.recorder.episode
        try:
            episode.state = dict(await self.graph.ainvoke(initial(question.question), self._config(), context=context))
        except JointragError:
            raise
        except GraphRecursionError:
            episode.error = f"no end within {self._config()['recursion_limit']} supersteps"
        except Exception as e:  # the boundary: a node of the user's failed, the episode records it
            if e is scheduler.failure:
                raise
            episode.error = f"{type(e).__name__}: {e}"
        return episode

    def run(
        self,
        questions: Sequence[Question],
        *,
        modes: Mapping[str, str] | None = None,
        sample: bool = False,
        seeds: Sequence[int] | None = None,
        oracle_form: str = "sub_question",
        labels: bool = False,
        spare: tuple[float, int] = (0.0, 0),
        concurrency: int = 256,
        progress: Callable[[int], None] | None = None,
    ) -> list[Episode]:
        """Run questions through the graph, `concurrency` at a time, batched; episodes are parallel to questions.

        spare: (share of sampled plans that are made to ask nothing, queries a question may ask before). Every episode
        failing is an error; one failing is recorded in `Episode.error` and answers "".
        """
        options = {"modes": self.check_modes(modes), "sample": sample, "oracle_form": oracle_form, "labels": labels}
        options["spare"] = spare
        seeds = [stable_seed("greedy", q.id) for q in questions] if seeds is None else list(seeds)

        async def all_of_them() -> list[Episode]:
            out: list[Episode] = []
            for start in range(0, len(questions), concurrency):
                scheduler = self.scheduler()
                part = zip(questions[start : start + concurrency], seeds[start : start + concurrency], strict=True)
                out += await asyncio.gather(*(self._episode(scheduler, q, s, options) for q, s in part))
                if progress:
                    progress(len(out))
                if not sample:
                    self.llm.forget()
            return out

        episodes = run_sync(all_of_them())
        if episodes and all(e.error for e in episodes):
            raise ConfigError(
                f"every episode failed, the first with {episodes[0].error}; expected a graph that runs: fix that node"
            )
        searches = [d for e in episodes for d in e.decisions if d.searches]
        if searches and all(d.failed for d in searches):
            raise RetrievalError(
                f"every search failed, the first with {searches[0].failed}; expected an index that answers: "
                f"look at it, then go on with --resume"
            )
        return episodes

    # ordinary LangGraph use

    async def ainvoke(
        self, question: str | Mapping[str, Any], modes: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Answer one question; returns the final state, with the episode under "episode"."""
        text = question if isinstance(question, str) else str(question["question"])
        q = asked(text)
        context = self._context(self.scheduler(), q, stable_seed("greedy", q.id), modes=self.check_modes(modes))
        state = dict(await self.graph.ainvoke(initial(text), self._config(), context=context))
        return {**state, "episode": context.recorder.episode}

    def invoke(self, question: str | Mapping[str, Any], modes: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Answer one question; `ainvoke`, waited for."""
        return run_sync(self.ainvoke(question, modes))

    def batch(self, questions: Sequence[str], modes: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Answer questions together, batched."""
        episodes = self.run([asked(q, f"ask{i}") for i, q in enumerate(questions)], modes=modes)
        return [{**e.state, "episode": e} for e in episodes]

    async def astream(self, question: str, modes: Mapping[str, str] | None = None) -> AsyncIterator[dict[str, Any]]:
        """Yield {node: update} as each node finishes."""
        q = asked(question)
        context = self._context(self.scheduler(), q, stable_seed("greedy", q.id), modes=self.check_modes(modes))
        async for update in self.graph.astream(
            initial(question), self._config(), context=context, stream_mode="updates"
        ):
            yield update

    def stream(self, question: str, modes: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield {node: update}; `astream`, collected."""

        async def collect() -> list[dict[str, Any]]:
            return [u async for u in self.astream(question, modes)]

        yield from run_sync(collect())

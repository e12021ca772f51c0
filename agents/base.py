"""Agent: a node that decides. It observes the state, acts through the language model, and writes an update.

A user's own agent is one subclass in the user's own file: `name`, `action`, `observe`, `update`, `default`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from langchain_core.runnables import RunnableConfig
from langgraph.runtime import Runtime

from jointrag.data.errors import ConfigError
from jointrag.data.types import Passage
from jointrag.graph.context import RagContext
from jointrag.graph.episode import Decision
from jointrag.llm.actions import FreeText, MalformedError
from jointrag.llm.types import Candidates, Observation, Request

State = Mapping[str, Any]
FREE = object()  # `forced` returns it where more than one action is legal


def prompt(name: str) -> str:
    """Return the shipped instruction of a role (agents/prompts/<name>.txt), "" where there is none."""
    file = resources.files("jointrag.agents") / "prompts" / f"{name}.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def read_prompt(path: str | None, role: str) -> str:
    """Return the instruction in the user's file `path`, or the shipped one of `role`."""
    if path is None:
        return prompt(role)
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"prompt file {path!r} cannot be read ({e}); expected a UTF-8 text file") from e


class Agent:
    """A trained node. Subclass it, or use the four shipped roles.

    name: unique in the graph; the head, the metrics and the flags carry it. action: what it emits. reads, writes: the
    state keys it needs and sets (checked against the graph). Every call records one Decision out of band.
    """

    name: str = ""
    action: Any = FreeText()
    reads: ClassVar[tuple[str, ...]] = ("question",)
    writes: ClassVar[tuple[str, ...]] = ()
    fills: ClassVar[tuple[str, ...]] = ()  # keys it sets where nobody else does
    trainable: bool = True

    # what a subclass says

    def observe(self, state: State) -> Observation:
        """Return what the agent sees."""
        raise NotImplementedError(
            f"{type(self).__name__}.observe(state): return Observation.of(state, instruction=...)"
        )

    def update(self, state: State, value: Any) -> dict[str, Any]:
        """Return what the action writes into the state."""
        raise NotImplementedError(f"{type(self).__name__}.update(state, value): return a dict of state keys")

    def default_value(self, state: State) -> Any:
        """Return the default action: what the pipeline does when this agent is absent."""
        return None

    def default(self, state: State) -> dict[str, Any]:
        """Return the update of the default action."""
        return self.update(state, self.default_value(state))

    def parse(self, state: State, value: Any) -> Any:
        """Return the action meant by what was read from the output; raise MalformedError where there is none."""
        if isinstance(value, str) and not value.strip():
            raise MalformedError("empty text; expected at least one word")
        return value

    def written(self, state: State, value: Any) -> Any:
        """Return what the language model would have to say for `parse` to return `value`."""
        return value

    def forced(self, state: State, context: RagContext) -> Any:
        """Return the only legal action, or FREE where there are several."""
        return FREE

    def ask_nothing(self, state: State) -> Any:
        """Return the action of a planner that plans no search, FREE for any other agent."""
        return FREE

    def oracle(self, state: State, context: RagContext, decision: Decision) -> Any:
        """Return the best action possible with what was received; the default where no gold is known."""
        return self.default_value(state)

    # how it acts

    async def __call__(self, state: Any, runtime: Runtime[RagContext], config: RunnableConfig) -> dict[str, Any]:
        """Act once: a LangGraph node."""
        context = runtime.context
        if not isinstance(context, RagContext):
            raise ConfigError(
                f"agent {self.name!r} ran without a RagContext; expected to run in a Pipeline: "
                f"Pipeline(graph, agents=[...]).invoke(question), and StateGraph(..., context_schema=RagContext)"
            )
        metadata = config.get("metadata") or {}
        step, branch = context.recorder.place(metadata)
        decision = Decision(
            agent=self.name,
            node=str(metadata.get("langgraph_node", self.name)),
            step=step,
            hop=int(state.get("hop") or 0),
            branch=branch,
            mode=context.mode(self.name),
            value=None,
            held=tuple(state.get("evidence") or ()),
        )
        decision.update = self._declared(await self.act(state, context, decision))
        context.recorder.add(decision)
        return dict(decision.update)

    def _declared(self, update: Any) -> dict[str, Any]:
        """Refuse an update of other keys than `writes` names: what a graph is checked by would not hold."""
        if not isinstance(update, Mapping):
            raise ConfigError(
                f"agent {self.name!r}: its update is {update!r}, expected a dict of state keys; return {{}} to write "
                f"nothing"
            )
        for key in update:
            if key not in (*self.writes, *self.fills):
                known = ", ".join(self.writes) or "none"
                raise ConfigError(
                    f"agent {self.name!r}: its update has the key {key!r}, expected keys it declares ({known}); add it "
                    f"to `writes`, or correct the name"
                )
        return dict(update)

    async def act(self, state: State, context: RagContext, decision: Decision) -> dict[str, Any]:
        """Decide in the mode of this pass, fill `decision`, return the update."""
        forced = self.forced(state, context)
        if decision.mode == "default" and forced is FREE:
            decision.value = self.default_value(state)
            return self.default(state)
        if decision.mode == "oracle" and forced is FREE:
            decision.value = self.oracle(state, context, decision)
            if decision.value is None:
                return self.default(state)
            if context.labels:
                self.label(state, context, decision, self.written(state, decision.value))
            return self.update(state, decision.value)
        if forced is not FREE:
            decision.value, decision.forced = forced, True
            return self.update(state, forced)
        nothing = self.ask_nothing(state)
        if nothing is not FREE:
            decision.spared = context.spares(decision, len(state.get("queries") or ()))
        if decision.spared:
            decision.value = nothing
            self.label(state, context, decision, self.written(state, nothing))
            return self.update(state, nothing)
        return await self.ask(state, context, decision)

    def _request(self, state: State, context: RagContext, decision: Decision, candidates: Candidates | None) -> Request:
        """Observe; record what is asked."""
        observation = self.observe(state)
        request, decision.dropped = context.llm.request(
            self.name,
            decision.mode,
            observation,
            self.action,
            (context.seed, decision.step, decision.branch, decision.node),
            candidates=candidates,
            sample=context.sample,
            seed=context.seed,
        )
        if decision.dropped:
            observation = replace(observation, passages=observation.passages[: -decision.dropped])
        decision.observation, decision.request = observation, request
        return request

    def label(
        self,
        state: State,
        context: RagContext,
        decision: Decision,
        written: Any,
        candidates: Candidates | None = None,
    ) -> None:
        """Record request and completion of an action the model did not choose: an oracle's, or a spared one."""
        request = self._request(state, context, decision, candidates)
        completion = context.llm.label(self.action, request, written)
        if request.grammar is None or len(completion.tokens) <= request.grammar.max_tokens:
            decision.completion = completion  # what is too long to be said teaches nothing

    async def ask(
        self, state: State, context: RagContext, decision: Decision, candidates: Candidates | None = None
    ) -> dict[str, Any]:
        """Ask the language model, read its action; a malformed one becomes the default, marked and penalised."""
        request = self._request(state, context, decision, candidates)
        decision.completion = completion = await context.llm.ask(request)
        try:
            if completion.cut:
                raise MalformedError(f"no end within {len(completion.tokens)} tokens; expected a shorter output")
            decision.value = self.parse(state, context.llm.read(self.action, request, completion))
        except MalformedError:
            decision.malformed = True
            decision.value = self.default_value(state)
            return self.default(state)
        return self.update(state, decision.value)


def unheld(passages: tuple[Passage, ...], held: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """Return the passages that are not held yet."""
    ids = {p.id for p in held}
    return tuple(p for p in passages if p.id not in ids)


__all__ = ["FREE", "Agent", "State", "prompt", "read_prompt", "unheld"]

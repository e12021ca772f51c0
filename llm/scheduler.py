"""Scheduler: concurrent episodes ask one at a time; it answers them in batches, in an order of their own.

Requests wait until no running episode can go on: a spell of event-loop turns in which nobody asks. No clock is read,
and randomness belongs to the request, so the same questions give the same bytes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from jointrag.llm.actions import Queries, Ranking, Select
from jointrag.llm.types import Candidates, Completion, Observation, Request
from jointrag.retrieval.base import Hits, Index

QUIET_TURNS = 40  # LangGraph needs fewer turns than this between two nodes
T = TypeVar("T")


class Scheduler:
    """Implements `graph.context.Asker` over one language model and one index."""

    def __init__(self, model: Any, index: Index, head_of: Mapping[str, str], temperature: Mapping[str, float]) -> None:
        self.model, self.index = model, index
        self.head_of, self.temperature = dict(head_of), dict(temperature)
        self._asked: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._searched: list[tuple[tuple[str, ...], int, asyncio.Future[list[Hits]]]] = []
        self._activity = 0
        self._drain: asyncio.Task[None] | None = None
        self.batches = 0
        self.failure: Exception | None = None  # of the language model: not the doing of any node

    def head(self, agent: str, mode: str) -> str | None:
        """Return the head that acts for `agent` in `mode`; None = the bare trunk."""
        name = self.head_of.get(agent)
        if mode == "trunk" or name is None:
            return None
        wanted = {"warm": f"{name}@warm", "swap": f"{agent}@swap"}.get(mode, name)
        return wanted if wanted in self.model.heads.names else None

    def request(
        self,
        agent: str,
        mode: str,
        observation: Observation,
        action: Any,
        key: tuple[Any, ...],
        *,
        candidates: Candidates | None = None,
        sample: bool = False,
        seed: int = 0,
    ) -> tuple[Request, int]:
        """Tokenise an observation and fix mask, head and randomness of one request."""
        template = self.model.template
        context, dropped = template.context(observation, self.model.max_context)
        learns = mode == "learn"
        temperature = self.temperature.get(agent, 1.0)
        grammar, picks = None, 0
        if isinstance(action, Ranking):
            picks = min(action.k, sum(candidates.legal) if candidates else 0)
            temperature *= action.tau
        elif isinstance(action, Select):
            grammar = action.grammar(template, len(observation.passages) - dropped)
        else:
            grammar = action.grammar(template)
        request = Request(
            key=key,
            role=agent,
            head=self.head(agent, mode),
            context=context,
            suffix=template.suffix(agent, observation.instruction),
            grammar=grammar,
            candidates=candidates,
            picks=picks,
            sample=sample and learns,
            temperature=temperature,
            seed=seed,
        )
        return request, dropped

    def read(self, action: Any, request: Request, completion: Completion) -> Any:
        """Return what an action says: text, queries, item numbers, or candidate ids in order."""
        if isinstance(action, Ranking):
            assert request.candidates is not None
            return tuple(request.candidates.ids[i] for i in completion.tokens)
        if isinstance(action, Select):
            return request.grammar.read(completion.tokens)
        if isinstance(action, Queries):
            return action.read(self.model.template, completion.tokens)
        return completion.text

    def label(self, action: Any, request: Request, value: Any) -> Completion:
        """Return the completion that says `value`."""
        if isinstance(action, Ranking):
            tokens: tuple[int, ...] = tuple(value)
            return Completion(tokens, (0.0,) * len(tokens), ())
        if isinstance(action, Select):
            tokens = request.grammar.write([n for n in value if n < len(request.grammar.items)])  # others were dropped
        else:
            tokens = action.write(self.model.template, value)
        masks = tuple(request.grammar.mask(tokens[:t]) for t in range(len(tokens)))
        return Completion(tokens, (0.0,) * len(tokens), masks, self.model.template.decode(tokens))

    async def ask(self, request: Request) -> Completion:
        """Answer one request, together with those of all other running episodes."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked.append((request, future))
        self._wake()
        return await future

    async def search(self, queries: tuple[str, ...], n: int) -> list[Hits]:
        """Search the index, together with all other running episodes."""
        future: asyncio.Future[list[Hits]] = asyncio.get_running_loop().create_future()
        self._searched.append((queries, n, future))
        self._wake()
        return await future

    def _wake(self) -> None:
        self._activity += 1
        if self._drain is None or self._drain.done():
            self._drain = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self._asked or self._searched:
            quiet, seen = 0, self._activity
            while quiet < QUIET_TURNS:
                await asyncio.sleep(0)
                quiet, seen = (quiet + 1, seen) if self._activity == seen else (0, self._activity)
            asked, self._asked = self._asked, []
            searched, self._searched = self._searched, []
            asked.sort(key=lambda x: (x[0].head or "", x[0].key))
            self.batches += 1
            self._settle([f for *_, f in searched], partial(self._search, searched))
            self.failure = self._settle([f for _, f in asked], partial(self.model.generate, [r for r, _ in asked]))

    def _search(self, searched: list[tuple[tuple[str, ...], int, asyncio.Future[list[Hits]]]]) -> list[list[Hits]]:
        """Search all queries of one size in one call."""
        found: dict[tuple[str, int], Hits] = {}
        for n in sorted({n for _, n, _ in searched}):
            queries = sorted({q for qs, m, _ in searched if m == n for q in qs})
            found |= {(q, n): h for q, h in zip(queries, self.index.search(queries, n), strict=True)}
        return [[found[q, n] for q in qs] for qs, n, _ in searched]

    @staticmethod
    def _settle(futures: list[asyncio.Future[Any]], work: Callable[[], list[Any]]) -> Exception | None:
        """Give each future its result, or all of them the failure, which is returned."""
        if not futures:
            return None
        try:
            results = work()
        except Exception as e:  # the boundary: every waiting episode learns of it
            for f in futures:
                if not f.done():
                    f.set_exception(e)
            return e
        for f, r in zip(futures, results, strict=True):
            if not f.done():
                f.set_result(r)
        return None


class InlineExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs work where it is submitted: a user's synchronous node takes no thread, so its episode is never "running"."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Run now; return a finished future."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as e:
            future.set_exception(e)
        return future


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on an own event loop, also from inside a running one (a notebook)."""

    async def main() -> T:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(max_workers=1))
        return await work

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main())
    box: list[Any] = []

    def target() -> None:
        try:
            box.append((asyncio.run(main()), None))
        except BaseException as e:
            box.append((None, e))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    value, error = box[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def stable_seed(*parts: Any) -> int:
    """Return a 63-bit seed that depends on `parts` alone."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


__all__ = ["InlineExecutor", "Scheduler", "run_sync", "stable_seed"]

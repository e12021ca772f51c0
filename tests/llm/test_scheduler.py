from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jointrag.data.errors import RetrievalError
from jointrag.data.types import Passage
from jointrag.llm.model import LanguageModel
from jointrag.llm.scheduler import Scheduler, run_sync, stable_seed
from jointrag.llm.types import Completion, Request
from jointrag.retrieval import Index, build_index
from jointrag.retrieval.base import Hits

Build = Callable[..., LanguageModel]
Ask = Callable[..., list[Request]]


@pytest.fixture(scope="module")
def index() -> Index:
    words = "otter heron badger lynx marten plover".split()
    return build_index(
        {"dim": 4}, [Passage(str(i), w.title(), f"The {w} eats {w} food .") for i, w in enumerate(words)]
    )


class Counting:
    """The model, with a count of calls and of their sizes."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.calls = model, list[list[tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls.append([r.key for r in requests])
        return self.model.generate(requests)


def gather(*work: Any) -> list[Any]:
    async def main() -> list[Any]:
        return list(await asyncio.gather(*(w() for w in work), return_exceptions=True))

    return run_sync(main())


def test_episodes_that_run_together_are_answered_in_one_batch_a_step(build: Build, ask: Ask, index: Index) -> None:
    """8 episodes of 3 requests each: 3 batches of 8, however many turns of the loop lie between."""
    model = Counting(build())
    requests = ask(model, 24)
    scheduler = Scheduler(model, index, {}, {})

    async def episode(i: int) -> list[Completion]:
        out = []
        for step in range(3):
            for _ in range((i * 7) % 11):
                await asyncio.sleep(0)
            out.append(await scheduler.ask(requests[3 * i + step]))
        return out

    done = gather(*(lambda i=i: episode(i) for i in range(8)))
    assert [len(c) for c in model.calls] == [8, 8, 8]
    assert scheduler.batches == 3
    alone = build().generate(requests)
    assert [c.tokens for e in done for c in e] == [c.tokens for c in alone]


def test_results_and_batches_do_not_depend_on_the_order_of_asking(build: Build, ask: Ask, index: Index) -> None:
    orders, answers = [], []
    for seed in range(3):
        model = Counting(build())
        requests = ask(model, 20)
        numbers = list(range(20))
        random.Random(seed).shuffle(numbers)
        scheduler = Scheduler(model, index, {}, {})
        done = gather(*(lambda r=requests[i], s=scheduler: s.ask(r) for i in numbers))
        orders.append(model.calls)
        answers.append({i: c for i, c in zip(numbers, done, strict=True)})
    assert orders[0] == orders[1] == orders[2]
    assert answers[0] == answers[1] == answers[2]


def test_searches_of_all_episodes_are_one_call_of_the_index(build: Build, index: Index) -> None:
    calls = []

    class Spy:
        def search(self, queries: Sequence[str], n: int) -> list[Hits]:
            calls.append((list(queries), n))
            return index.search(queries, n)

    scheduler = Scheduler(build(), Spy(), {}, {})  # type: ignore[arg-type]
    asked = [("otter",), ("lynx", "otter"), ("heron",)]
    found = gather(*(lambda q=q: scheduler.search(q, 2) for q in asked))
    assert calls == [(["heron", "lynx", "otter"], 2)]
    assert [[h.ids[0] for h in hits] for hits in found] == [["0"], ["3", "0"], ["1"]]


def test_a_models_failure_reaches_every_waiting_episode_and_the_next_batch_runs(
    build: Build, ask: Ask, index: Index
) -> None:
    class Failing(Counting):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            if not self.calls:
                self.calls.append([])
                raise RuntimeError("out of memory")
            return super().generate(requests)

    model = Failing(build())
    requests = ask(model, 4)
    scheduler = Scheduler(model, index, {}, {})

    async def main() -> tuple[list[Any], Completion]:
        first = await asyncio.gather(*(scheduler.ask(r) for r in requests), return_exceptions=True)
        return first, await scheduler.ask(requests[0])

    first, again = run_sync(main())
    assert [str(e) for e in first] == ["out of memory"] * 4
    assert again.tokens


def test_a_failing_search_leaves_the_language_models_answers_alone(build: Build, ask: Ask) -> None:
    class Broken:
        def search(self, queries: Sequence[str], n: int) -> list[Hits]:
            raise RetrievalError("the server is away")

    model = build()
    scheduler = Scheduler(model, Broken(), {}, {})  # type: ignore[arg-type]
    request = ask(model, 1)[0]
    found, done = gather(lambda: scheduler.search(("q",), 2), lambda: scheduler.ask(request))
    assert isinstance(found, RetrievalError)
    assert isinstance(done, Completion)


def test_run_sync_works_inside_a_running_loop_and_hands_errors_on() -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def fails() -> None:
        raise KeyError("x")

    async def main() -> tuple[str, type[BaseException]]:
        with pytest.raises(KeyError) as error:
            run_sync(fails())
        return run_sync(work()), error.type

    assert run_sync(work()) == threading.main_thread().name
    name, error = asyncio.run(main())
    assert name != threading.main_thread().name
    assert error is KeyError


def test_synchronous_work_takes_no_thread() -> None:
    async def main() -> tuple[str, BaseException | None]:
        loop = asyncio.get_running_loop()
        name = await loop.run_in_executor(None, lambda: threading.current_thread().name)
        try:
            await loop.run_in_executor(None, lambda: 1 // 0)
        except ZeroDivisionError as e:
            return name, e
        return name, None

    name, error = run_sync(main())
    assert name == threading.main_thread().name
    assert isinstance(error, ZeroDivisionError)


def test_modes_choose_the_head(build: Build, index: Index) -> None:
    model = build()
    model.heads.copy("answerer", "answerer@warm")
    scheduler = Scheduler(model, index, {"answerer": "answerer", "judge": "answerer"}, {})
    assert scheduler.head("answerer", "learn") == scheduler.head("answerer", "frozen") == "answerer"
    assert scheduler.head("judge", "learn") == "answerer"  # a shared head
    assert scheduler.head("answerer", "warm") == scheduler.head("judge", "warm") == "answerer@warm"
    assert scheduler.head("answerer", "trunk") is None
    assert scheduler.head("stranger", "learn") is None


def test_seeds_depend_on_their_parts_alone() -> None:
    assert stable_seed("a", 1) == stable_seed("a", 1)
    assert len({stable_seed("a", 1), stable_seed("a", 2), stable_seed("b", 1), stable_seed("a1")}) == 4
    assert 0 <= stable_seed() < 2**63

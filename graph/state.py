"""RagState: the keys every node reads and writes, each with its own merge rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypedDict

from jointrag.data.types import Passage
from jointrag.retrieval.fusion import rrf


class Passages(list[Passage]):
    """Passages of one search round; rankings of parallel branches of that round are kept until merged."""

    def __init__(self, items: Iterable[Passage] = (), hop: int = 0, rankings: Sequence[Sequence[Passage]] = ()) -> None:
        super().__init__(items)
        self.hop = hop
        self.rankings = [list(r) for r in rankings] or [list(self)]


def merge_round(old: Sequence[Passage] | None, new: Sequence[Passage]) -> Passages:
    """Replace at a new search round; within one round merge by reciprocal rank into the largest branch's size."""
    new = new if isinstance(new, Passages) else Passages(new)
    if not isinstance(old, Passages) or old.hop != new.hop:
        return new
    rankings = sorted([*old.rankings, *new.rankings], key=lambda r: [p.id for p in r])
    merged = [p for p, _ in rrf(rankings)][: max(len(r) for r in rankings)]
    return Passages(merged, new.hop, rankings)


def append(old: Sequence[Any] | None, new: Sequence[Any]) -> list[Any]:
    """Concatenate."""
    return [*(old or ()), *new]


def union(old: Sequence[Any] | None, new: Sequence[Any]) -> list[Any]:
    """Concatenate without duplicates, first occurrence first."""
    out = list(old or ())
    for item in new:
        if item not in out:
            out.append(item)
    return out


def larger(old: Any, new: Any) -> Any:
    """Keep the larger value."""
    return new if old is None else max(old, new)


def replace(old: Any, new: Any) -> Any:
    """Keep the newer value; unlike LangGraph's own last-value channel it takes the last of parallel writers."""
    return new


MERGE = {"replace": None, "append": append, "union": union, "max": larger}  # None: two parallel writers are an error


class RagState(TypedDict, total=False):
    """The state of one question. Extra keys are declared by the graph that uses them."""

    question: str
    queries: Annotated[list[str], append]  # all asked so far, in order: the trail
    pending: Annotated[list[str], replace]  # queries of this hop
    passages: Annotated[list[Passage], merge_round]  # retrieved in this hop
    evidence: Annotated[list[Passage], union]  # kept so far
    hop: Annotated[int, larger]  # search rounds so far
    answer: str


def initial(question: str) -> dict[str, Any]:
    """Return the state an invocation starts from."""
    return {"question": question, "queries": [], "pending": [], "passages": [], "evidence": [], "hop": 0}


def wants_search(state: RagState) -> bool:
    """True while the rewriter asked for another search (it cannot ask past the hop limit)."""
    return bool(state.get("pending"))

"""Told episodes: what a graph can do, move by move, without model, corpus or index.

A small world of its own: two gold passages, some others, and three questions about it. Every agent of a known part (it
writes queries, passages, evidence or the answer) plays its canonical outputs, within what it may do at all
(max_queries, k, budget, max_tokens, max_hops).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jointrag.data.types import UNKNOWN, Passage, Question
from jointrag.graph.declare import Declared
from jointrag.graph.episode import Decision, Episode
from jointrag.graph.state import Passages
from jointrag.llm.types import Completion, Observation, Request

ROUNDS = 6  # of a loop that are told; what pays once more in six pays in sixty
OVERSIZED = 50  # queries, passages and hops of an episode that only bounds are checked on
TEXTS = {
    "a": ("Ann Lee", "Ann Lee was born in Oslo."),
    "b": ("Oslo", "Oslo is the capital of the Kingdom of Norway. Yes, Norway."),
    "x": ("Bo Ray", "Bo Ray bakes bread in Sweden."),
    "y": ("Cy Poe", "Cy Poe sails to Denmark."),
    **{f"z{n}": (f"Place {n}", f"Place {n} is far away.") for n in range(OVERSIZED)},
}
GOLD, JUNK = ("a", "b"), ("x", "y")
BRIDGE = Question("two hops", "In which country was Ann Lee born?", ("Kingdom of Norway", "Norway"), GOLD, hops=2)
YES = Question("yes or no", "Does Oslo lie in the country of Ann Lee?", ("yes",), GOLD, hops=2)
NO = Question("no", "Was Ann Lee born in Sweden?", ("no",), GOLD, hops=2)
ONE = Question("one hop", "Where was Ann Lee born?", ("Oslo",), ("a",), hops=1)
ABSENT = Question("unanswerable", "Who taught Ann Lee?", (UNKNOWN,), ("a",))
WRONG, PARTLY = "Sweden", "Kingdom"
FIRST, SECOND, OTHER = "Ann Lee born", "Oslo country", "bread"


@dataclass(frozen=True)
class Cast:
    """Who plays which part, None = nobody, and how much each may do."""

    planner: str | None = None
    retriever: str | None = None
    keeper: str | None = None
    answerer: str | None = None
    other: str | None = None  # an agent of no known part: it writes a text of its own before the answer
    writes: tuple[str, ...] = ("text",)  # into these keys
    max_queries: int = 1
    max_hops: int = 1
    k: int = 5
    budget: int = 5
    words: int = 16  # of an answer
    context: int = 512  # tokens the language model reads
    stops: bool = True  # the planner can go on without searching
    logprob: float = -0.5  # of each token written
    dropped: int = 0  # passages that did not fit the context

    @property
    def played(self) -> set[str]:
        """Names of the agents with a part."""
        return {n for n in (self.planner, self.retriever, self.keeper, self.answerer) if n}

    def who(self, part: str) -> str | None:
        """Return who makes a move of this part."""
        ends = self.answerer or self.other
        return {"ask": self.planner, "find": self.retriever, "keep": self.keeper, "answer": ends}[part]


class Move(NamedTuple):
    """One move of a told episode: ask | find | keep | answer. () asked = stopped."""

    part: str
    what: tuple[str, ...]
    malformed: bool = False

    def __str__(self) -> str:
        """The move in words."""
        texts = [t if len(t) <= 60 else f"{t[:40]} ... ({len(t):,} characters)" for t in self.what]
        said = ", ".join(map(repr, texts)) if self.part in ("ask", "answer") else " ".join(texts)
        said = said if len(texts) <= 8 else f"{len(texts)} {'queries' if self.part == 'ask' else 'passages'}"
        text = {"ask": "stop", "keep": "keep nothing", "find": "find nothing"}.get(self.part) if not self.what else None
        return (text or f"{self.part} {said}") + (" (malformed)" if self.malformed else "")


def ask(*queries: str, malformed: bool = False) -> Move:
    """Ask, or stop."""
    return Move("ask", queries, malformed)


def find(*ids: str) -> Move:
    """Retrieve these passages, in this order."""
    return Move("find", ids)


def keep(*ids: str, malformed: bool = False) -> Move:
    """Keep those of the passages found."""
    return Move("keep", ids, malformed)


def answer(text: str, malformed: bool = False) -> Move:
    """End with this answer."""
    return Move("answer", (text,), malformed)


def casts(declared: Declared, max_hops: int, context: int = 512) -> list[Cast]:
    """Return casts in which every agent of a known part plays it once."""
    parts: dict[str, list[Any]] = {"planner": [], "retriever": [], "keeper": [], "answerer": []}
    for agent in declared.agents:
        for key, part in (
            ("answer", "answerer"),
            ("evidence", "keeper"),
            ("passages", "retriever"),
            ("pending", "planner"),
        ):
            if key in agent.writes:
                parts[part].append(agent)
                break
    out = []
    for n in range(max(map(len, parts.values()), default=0)):
        of: dict[str, Any] = {
            part: agents[min(n, len(agents) - 1)] if agents else None for part, agents in parts.items()
        }
        action = {part: getattr(a, "action", None) for part, a in of.items()}
        out.append(
            Cast(
                planner=of["planner"] and of["planner"].name,
                retriever=of["retriever"] and of["retriever"].name,
                keeper=of["keeper"] and of["keeper"].name,
                answerer=of["answerer"] and of["answerer"].name,
                max_queries=getattr(action["planner"], "max_queries", 1),
                max_hops=max_hops if of["planner"] and _loops(declared, of["planner"].name) else 1,
                context=context,
                stops=of["planner"] is None or len(_ways(declared, of["planner"].name)) > 1,
                k=getattr(action["retriever"], "k", 5),
                budget=getattr(of["keeper"], "budget", 5),
                words=getattr(action["answerer"], "max_tokens", 16),
            )
        )
    return out


def _ways(declared: Declared, name: str) -> tuple[str, ...]:
    edge = declared.edges.get(name)
    return edge.targets if edge else ("", "")  # inside a subgraph: both ways are taken for possible


def _loops(declared: Declared, name: str) -> bool:
    """True where the node can come again; inside a subgraph it is taken to."""
    if name not in declared.edges:
        return True
    seen: set[str] = set()
    ahead = list(declared.edges[name].targets)
    while ahead:
        node = ahead.pop()
        if node == name:
            return True
        if node not in seen:
            seen.add(node)
            ahead += declared.edges[node].targets if node in declared.edges else ()
    return False


def tell(question: Question, moves: Iterable[Move], cast: Cast) -> Episode:
    """Return the episode of these moves; those of parts that nobody plays happen without a decision."""
    episode = Episode(question, seed=0)
    held: list[Passage] = []
    trail: list[str] = []
    pending: list[str] = []
    shown: list[Passage] = []
    hop = 0
    for part, what, malformed in moves:
        update: dict[str, Any] = {}
        received: list[Passage] = []
        before = list(held)
        if part == "ask":
            update, pending = {"queries": list(what), "pending": list(what)}, list(what)
        elif part == "find":
            shown = [passage(i) for i in what]
            received = [*shown, *(passage(i) for i in (*GOLD, *JUNK) if i not in what)]
            update = {"passages": Passages(shown, hop + 1), "hop": hop + 1}
            held += shown if cast.keeper is None else []
        elif part == "keep":
            received = [p for p in shown if p not in held]
            kept = [p for p in received if p.id in what]
            update = {"evidence": kept}
            held += kept if cast.keeper is not None else []
        else:
            update = dict.fromkeys(cast.writes if cast.other and not cast.answerer else ("answer",), what[0])
        agent = cast.who(part)
        if agent is not None:
            shown_tokens = 100 * (len(received) if part == "keep" else len(before))  # a passage is some 100 tokens
            read = cast.context if cast.dropped else min(cast.context, 40 + shown_tokens)
            episode.decisions.append(
                Decision(
                    agent=agent, node=agent, step=len(episode.decisions), hop=hop, branch=0, mode="learn",
                    value=what[0] if part == "answer" else what, dropped=cast.dropped,
                    observation=Observation(question.question, tuple(before), tuple(trail)), received=tuple(received),
                    held=tuple(before), update=update, malformed=malformed,
                    request=Request((), agent, agent, tuple(range(read)), (0,) * 8),
                    completion=_said(part, what, cast),
                    forced=part == "ask" and hop >= cast.max_hops,
                    searches=max(1, len(pending)) if part == "find" else 0,
                )
            )  # fmt: skip
        hop += part == "find"
        trail += what if part == "ask" else ()
    final = next((m.what[0] for m in reversed(list(moves)) if m.part == "answer"), "")
    episode.state = {
        "question": question.question, "queries": trail, "pending": pending, "passages": shown, "evidence": held,
        "hop": hop, "answer": final,
    }  # fmt: skip
    return episode


def _said(part: str, what: Sequence[str], cast: Cast) -> Completion:
    """Return as many tokens as there are words or items, and an end; an answer is cut where the agent's would be."""
    count = sum(len(w.split()) for w in what) if part in ("ask", "answer") else len(what)
    count = 1 + (min(count, cast.words) if part == "answer" else count)
    return Completion(tuple(range(count)), (cast.logprob,) * count, ())


def passage(pid: str) -> Passage:
    """Return one of the passages of the told world."""
    return Passage(pid, *TEXTS[pid])


def told(moves: Sequence[Move], cast: Cast) -> str:
    """Return an episode in words, without the parts nobody plays."""
    said = [str(m) for m in moves if cast.who(m.part)]
    return "; ".join(said if len(said) <= 16 else [*said[:6], f"... {len(said) - 8} more moves", *said[-2:]])


def gather(cast: Cast, *extra: Move) -> list[Move]:
    """Return the moves that find and keep all gold and stop: in two hops where there are two, and room."""
    k, asked = cast.k, [FIRST, SECOND][: cast.max_queries]
    if cast.max_hops > 1:
        return [
            ask(FIRST),
            find(*("a", "x")[:k]),
            keep("a"),
            ask(SECOND),
            find(*("b", "y")[:k]),
            keep("b"),
            *extra,
            ask(),
        ]
    return [ask(*asked), find(*("a", "b", "x")[: max(2, k)]), keep("a", "b"), *extra, ask()]


def episodes_of(cast: Cast) -> list[tuple[Question, list[Move]]]:
    """Return the episodes this cast can play: answers of all kinds, searches of all kinds."""
    k, out = cast.k, list[tuple[Question, list[Move]]]()
    gold = BRIDGE.answers[0]
    long = " ".join(["word"] * max(1, cast.words - 1))
    texts = (
        *BRIDGE.answers,
        " ".join(BRIDGE.answers),
        f"{gold} {gold}",
        PARTLY,
        WRONG,
        f"{gold} {WRONG}",
        "",
        UNKNOWN,
        "yes",
        "no",
        TEXTS["b"][0],
        f"{WRONG}, or maybe {gold} and Denmark",
        long,
    )
    for question in (BRIDGE, YES, NO, ONE, ABSENT, replace(BRIDGE, supporting_ids=())):
        for start in (gather(cast), [ask()]):
            out += [(question, [*start, answer(t)]) for t in texts]
            out += [(question, [*start, answer(question.answers[0], malformed=True)])]
        queries = tuple(f"{FIRST} {n}" for n in range(cast.max_queries))
        asks = [ask(*queries[:n]) for n in range(1, len(queries) + 1)]
        asks += [ask(FIRST, f"{FIRST}?")] if cast.max_queries > 1 else []
        asks += [
            ask(FIRST),
            ask(OTHER),
            ask(question.question),
            ask(f"{FIRST} {question.answers[0]}"),
            ask(question.answers[0]),
            ask(" ".join([FIRST, *["word"] * 18])),
            ask(FIRST, malformed=True),
        ]
        finds = [
            find(*ids[:k])
            for ids in (("a", "x"), ("x", "a"), ("a", "b"), ("x", "y", "a", "b"), ("x", "y"), (), tuple(TEXTS))
        ]
        keeps = [
            keep(),
            keep("a"),
            keep("a", "b"),
            keep("x"),
            keep("a", "x"),
            keep(*tuple(TEXTS)[: cast.budget]),
            keep("a", malformed=True),
        ]
        end = [ask(), answer(gold)]
        out += [(question, [a, finds[0], keeps[1], *end]) for a in asks]
        out += [(question, [asks[0], f, kept, *end]) for f in finds for kept in keeps]
        if cast.max_hops > 1:
            one = [ask(FIRST), find("a"), keep("a")]
            more = [
                one,
                [ask(FIRST), find("b"), keep("b")],
                [ask(SECOND), find("b"), keep()],
                [ask(OTHER), find("x"), keep("x")],
            ]
            for extra in more:
                out += [(question, [*one, *extra * n, *end]) for n in range(1, min(cast.max_hops, ROUNDS))]
                out += [(question, [ask(FIRST), find("a"), keep(), *extra, *end])]
            out += [(question, [*one * cast.max_hops, answer(gold)])]
    return out


def rare(cast: Cast) -> list[Cast]:
    """Return the cast as it is seldom: unsure of what it writes, with passages that do not fit, short of room."""
    return [replace(cast, logprob=-4.0), replace(cast, dropped=2), replace(cast, context=60)]


def oversized(cast: Cast) -> list[tuple[Question, list[Move]]]:
    """Return episodes beyond every cap, which a bounded term must bear."""
    many, ids = tuple(f"query {n}" for n in range(OVERSIZED)), tuple(TEXTS)
    hops = [m for n in range(OVERSIZED) for m in (ask(many[n]), find(*ids), keep(ids[4 + n]))]
    endless = answer(" ".join(["word"] * 2000))
    return [
        (BRIDGE, [*hops, endless]), (BRIDGE, [ask(*many), find(*ids), keep(*ids), endless]),
        (BRIDGE, [ask("word " * 2000), find(), keep(), answer(" ".join(["Norway"] * 2000))]),
    ]  # fmt: skip

"""Reward linter: tells canonical episodes, scores them as training would, and names terms that reward the wrong thing.

Every agent of a known part (it writes queries, passages, evidence or the answer) plays its canonical outputs: asking,
asking again, stuffing, stopping; finding gold or not; keeping gold, everything, nothing; each kind of answer. What an
agent may do at all (max_queries, k, budget, max_tokens, max_hops) bounds the episodes. A finding holds the term, what
is wrong, and the episode that shows it. No model, corpus or index is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from jointrag.configs.schema import Config
from jointrag.data.errors import TrainingError
from jointrag.data.types import UNKNOWN, Question
from jointrag.graph.declare import declare_config
from jointrag.graph.episode import Episode
from jointrag.lab.stories import (
    ABSENT,
    BRIDGE,
    FIRST,
    GOLD,
    JUNK,
    NO,
    ONE,
    OTHER,
    PARTLY,
    ROUNDS,
    SECOND,
    WRONG,
    YES,
    Cast,
    Move,
    answer,
    ask,
    casts,
    episodes_of,
    find,
    gather,
    keep,
    oversized,
    rare,
    tell,
    told,
)
from jointrag.rewards.base import ProcessTerm, TeamTerm
from jointrag.rewards.build import RewardFunction, Weight, config_rewards
from jointrag.rewards.reading import malformed_answer

EPS = 1e-9
CLEAR = 0.02  # more than the tokens of an answer or a query cost
LATE = 10**12  # episodes done: every schedule is at its end


@dataclass(frozen=True)
class Finding:
    """One thing wrong. `term`: "team.f1", "filter.evidence_f1" ..., or "team" where no single term is to blame."""

    check: str
    term: str
    problem: str
    episode: str  # the counterexample, move by move

    def __str__(self) -> str:
        """The finding as one line."""
        return f"{self.term}: {self.problem} [{self.check}]\n    {self.episode}"


class Linter:
    """Checks one reward function on one cast, at one point of its weights' schedules."""

    def __init__(self, rewards: RewardFunction, cast: Cast, done: int) -> None:
        self.rewards, self.cast, self.done = rewards, cast, done
        self.findings: list[Finding] = []
        self.weights = rewards.weights_at(done)

    # reading

    def score(self, question: Question, moves: Sequence[Move]) -> Episode:
        """Return the episode with its rewards."""
        episode = tell(question, moves, self.cast)
        self.rewards.score(episode, self.done)
        return episode

    def worth(self, episode: Episode, agent: str | None) -> dict[str, float]:
        """Return what `agent` sees of an episode: team terms, and its own process terms summed over it."""
        out = {f"team.{k}": v for k, v in episode.team.items()}
        for d, terms in zip(episode.decisions, episode.process, strict=True):
            for k, v in terms.items():
                if d.agent == agent:
                    out[f"{agent}.{k}"] = out.get(f"{agent}.{k}", 0.0) + v
        return out

    def found(self, check: str, term: str, problem: str, moves: Sequence[Move], question: Question = BRIDGE) -> None:
        """Add a finding."""
        said = f"{question.id} question {question.question!r}: {told(moves, self.cast)}"
        self.findings.append(Finding(check, term, problem, said))

    def prefer(
        self, check: str, better: Mapping[str, float], worse: Mapping[str, float], problem: str, moves: Sequence[Move],
        question: Question = BRIDGE,
    ) -> None:  # fmt: skip
        """Add a finding unless `better` sums to more; to blame is the term that favours `worse` most."""
        if sum(better.values()) > sum(worse.values()) + EPS:
            return
        gap = {k: worse.get(k, 0.0) - better.get(k, 0.0) for k in {**better, **worse}}
        scheduled = {
            f"{owner}.{n}" for owner, terms in owned(self.rewards).items() for n, _, w in terms if w.start != w.end
        }
        weights = self.weights
        blamed = max(
            gap, key=lambda k: (round(gap[k], 9), k in scheduled, abs(weights.get(k, 0.0))), default="team"
        )  # where none favours `worse`: a weight that has come to nothing, or the largest, which should have judged
        told_problem = f"{problem} ({sum(worse.values()):+.3g} against {sum(better.values()):+.3g})"
        self.found(check, blamed if gap else "team", told_problem, moves, question)

    # checks

    def run(self) -> list[Finding]:
        """Return everything found."""
        if self.cast.answerer:
            self.order()
            self.gold_answers()
        if self.cast.planner and self.cast.retriever:
            self.stuffing()
            if self.cast.stops:
                self.searching()
            if self.cast.max_hops > 1:
                self.loops()
        if self.cast.retriever:
            self.retrieving()
        if self.cast.keeper and self.cast.retriever:
            self.empty_selection()
        return self.findings

    def answered(
        self, text: str, start: Sequence[Move], question: Question = BRIDGE, malformed: bool = False
    ) -> dict[str, float]:
        """Return what the answerer sees of an episode that ends with this answer."""
        return self.worth(self.score(question, [*start, answer(text, malformed)]), self.cast.answerer)

    def order(self) -> None:
        """Correct > partly correct > wrong > no answer > malformed, whatever was found."""
        gold, start = BRIDGE.answers[0], gather(self.cast)
        for better, worse, problem in (
            (gold, f"{gold} {WRONG}", "a wrong value beside the right one costs nothing, so naming many pays"),
            (gold, PARTLY, "a partly correct answer is worth as much as the correct one"),
            (PARTLY, WRONG, "a wrong answer is worth as much as a partly correct one"),
        ):
            good, bad = (self.answered(text, start) for text in (better, worse))
            if better == PARTLY and math.isclose(sum(good.values()), sum(bad.values())):
                continue  # an exact-match reward knows no partly
            self.prefer("order", good, bad, problem, [*start, answer(worse)])
        poor = [ask(FIRST), find(*JUNK[: self.cast.k]), keep(), ask()]
        half = [ask(FIRST), find(*("a", "x")[: self.cast.k]), keep("a"), ask()]
        for question in (BRIDGE, YES, NO, ONE):
            for begun in [start, half, poor, *([[ask()]] if self.cast.stops and self.cast.planner else [])]:
                for text, check in (("", "no answer"), (UNKNOWN, "free unknown"), ("Unknown.", "free unknown")):
                    problem = f"{text or 'no answer'!r} is worth as much as a wrong answer where there is one to give"
                    good, bad = (self.answered(t, begun, question) for t in (WRONG, text))
                    if check not in self._checks():
                        self.prefer(check, good, bad, problem, [*begun, answer(text)], question)
        for text in ("", UNKNOWN):
            malformed = self.answered(gold, start, malformed=True)
            problem = "a malformed answer is worth as much as none"
            self.prefer("order", self.answered(text, start), malformed, problem, [*start, answer(gold, True)])
        good, bad = (self.answered(text, start, ABSENT) for text in (UNKNOWN, WRONG))
        problem = "where nothing can be answered, an answer is worth as much as abstaining"
        self.prefer("order", good, bad, problem, [*start, answer(WRONG)], ABSENT)

    def gold_answers(self) -> None:
        """Every gold answer is worth the most there is, and saying more than it is worth less."""
        start = gather(self.cast)
        gold, alias = BRIDGE.answers
        joined, twice = f"{gold} {alias}", f"{gold} {gold}"
        cases = [(q, text) for q in (BRIDGE, YES, NO, ABSENT) for text in q.answers]
        found_out = [ask(FIRST), find(*("a", "x")[: self.cast.k]), keep("a"), ask()]  # all that ABSENT has
        starts = {q.id: found_out if q is ABSENT else start for q, _ in cases}
        worths = [self.answered(text, starts[q.id], q) for q, text in cases]
        wrongs = [self.answered(WRONG, starts[q.id], q) for q, _ in cases]
        many = self.answered(joined, start)
        for term in worths[0]:
            of, wrong = ([w.get(term, 0.0) for w in all_of] for all_of in (worths, wrongs))
            if not any(x > w + EPS for x, w in zip(of, wrong, strict=True)):  # a penalty, or it does not judge answers
                punished = [n for n, (x, w) in enumerate(zip(of, wrong, strict=True)) if x < w - CLEAR]
                for question, text in [cases[n] for n in punished[:1]]:
                    mine = of[punished[0]]
                    problem = (
                        f"the gold answer {text!r} is worth {mine:.3g}, the wrong {WRONG!r} {wrong[punished[0]]:.3g}"
                    )
                    self.found("gold below maximum", term, problem, [*starts[question.id], answer(text)], question)
                continue
            for (question, text), mine in zip(cases, of, strict=True):
                if question is BRIDGE and many[term] > mine + EPS:
                    problem = f"all aliases in one answer are worth more ({many[term]:.3g}) than {text!r} ({mine:.3g})"
                    self.found("joined aliases", term, problem, [*start, answer(joined)])
                if mine < max(of) - EPS:
                    problem = f"the gold answer {text!r} is worth {mine:.3g}, other gold answers {max(of):.3g}"
                    self.found("gold below maximum", term, problem, [*starts[question.id], answer(text)], question)
                    break
        for begun in ([ask()], gather(self.cast, *self._wrong_too())):  # where evidence holds both, it tells neither
            plain = {text: self.answered(text, begun) for text in (gold, twice, f"{gold} {WRONG}", WRONG)}
            for term, most in plain[gold].items():
                padded, other = (plain[text].get(term, 0.0) for text in (f"{gold} {WRONG}", WRONG))
                if most > other + EPS and padded < most - EPS and plain[twice].get(term, 0.0) >= most - EPS:
                    problem = f"{twice!r} is worth as much as {gold!r}: words are counted as a set; count repeats"
                    self.found("F1 over sets", term, problem, [*begun, answer(twice)])

    def _wrong_too(self) -> list[Move]:
        """Find and keep the passage that tells the wrong answer as well."""
        return [ask(OTHER), find("x"), keep("x")] if self.cast.max_hops > 2 else [find("x"), keep("x")]

    def _checks(self) -> set[str]:
        return {f.check for f in self.findings}

    def _blamed(self, check: str) -> set[str]:
        return {f.term for f in self.findings if f.check == check}

    def stuffing(self) -> None:
        """A query that gives away an answer nobody has read yet earns nothing."""
        one = [ask(FIRST), find("a"), keep("a")]
        for alias, begun, beside in product(
            BRIDGE.answers,
            ([], one) if self.cast.max_hops > 1 else ([],),
            ((), (SECOND,)) if self.cast.max_queries > 1 else ((),),
        ):
            for final in (WRONG, alias):
                end = [find(*GOLD[: self.cast.k]), keep(*GOLD), ask(), answer(final)]
                neutral = self.raw(tell(BRIDGE, [*begun, ask(f"{FIRST} {OTHER}", *beside), *end], self.cast))
                for query in (f"{FIRST} {alias}", alias):
                    moves = [*begun, ask(query, *beside), *end]
                    episode = self.score(BRIDGE, moves)
                    own = [p for d, p in zip(episode.decisions, episode.process, strict=True) if query in d.value]
                    for term, value in own[0].items():
                        if value > EPS:
                            self.found(
                                "stuffed query", f"{self.cast.planner}.{term}",
                                f"a query stuffed with the answer is paid {value:.3g}: rewards.guards.answer_in_query "
                                f"is off", moves,
                            )  # fmt: skip
                    for term, value in self.raw(episode).items():
                        if value > neutral[term] + (CLEAR if query == alias else EPS):
                            problem = f"putting the answer into the query is worth {value - neutral[term]:.3g}"
                            self.found("stuffed query", term, problem, moves)

    def raw(self, episode: Episode) -> dict[str, float]:
        """Return every term's value times its weight, summed over the episode, before any guard."""
        out: dict[str, float] = {}
        for owner, terms in owned(self.rewards).items():
            for name, term, _ in terms:
                key = f"{owner}.{name}"
                out[key] = sum(paid(owner, term, self.weights[key], episode))
        return out

    def searching(self) -> None:
        """Searching and answering right every other time beats not searching and answering wrong."""
        me, start = self.cast.planner, gather(self.cast)
        right = self.worth(self.score(BRIDGE, [*start, answer(BRIDGE.answers[0])]), me)
        wrong = self.worth(self.score(BRIDGE, [*start, answer(WRONG)]), me)
        half = {k: (right.get(k, 0.0) + wrong.get(k, 0.0)) / 2 for k in {**right, **wrong}}
        moves = [ask(), answer(WRONG)]
        none = self.worth(self.score(BRIDGE, moves), me)
        problem = "not searching at all is worth as much as searching and being right half of the time; lower the cost"
        for own in ("", "team."):  # with the planner's own process rewards, and by the outcome alone
            better, worse = ({k: v for k, v in x.items() if k.startswith(own)} for x in (half, none))
            self.prefer("zero searches", better, worse, problem, moves)

    def retrieving(self) -> None:
        """No retrieval of other passages is worth more to the retriever than one of gold."""
        me, end = self.cast.retriever, [keep("a"), ask(), answer(WRONG)]
        good = self.worth(self.score(BRIDGE, [ask(FIRST), find(*GOLD[: self.cast.k]), *end]), me)
        moves = [ask(FIRST), find(*JUNK[: self.cast.k]), *end]
        bad = self.worth(self.score(BRIDGE, moves), me)
        for term in (t for t in good if t.startswith(f"{me}.") and bad.get(t, 0.0) > good[t] + EPS):
            problem = f"passages that are not gold are worth more ({bad[term]:+.3g}) than gold ({good[term]:+.3g})"
            self.found("order", term, problem, moves)

    def empty_selection(self) -> None:
        """Keeping nothing costs where gold was shown, and earns nothing where none was."""
        me, k = self.cast.keeper, self.cast.k
        first = [ask(FIRST), find(*JUNK[:k]), keep()]

        def seen(start: Sequence[Move], ids: Sequence[str], kept: Sequence[str]) -> tuple[dict[str, float], list[Move]]:
            """What the keeper's last selection and the team's terms are worth."""
            moves = [*start, ask(FIRST), find(*ids[:k]), keep(*kept)]
            episode = self.score(BRIDGE, [*moves, ask(), answer(WRONG)])
            own = [p for d, p in zip(episode.decisions, episode.process, strict=True) if d.agent == me][-1]
            return {f"{me}.{t}": v for t, v in own.items()} | {f"team.{t}": v for t, v in episode.team.items()}, moves

        for start in ([], first) if self.cast.max_hops > 1 else ([],):
            for ids in (("a", "x"), ("x", "a")) if k > 1 else (("a",),):
                none, moves = seen(start, ids, ())
                right, wrong = (seen(start, ids, kept)[0] for kept in (("a",), ("x",)))
                judging = {t for t in none if right[t] > none[t] + EPS}  # others are costs, and cost less for nothing
                paying = {t for t in none if t.startswith(f"{me}.") and none[t] > EPS}
                paying |= {t for t in none if none[t] > max(wrong[t] + CLEAR, right[t] - EPS)}  # of the team's
                own = [t for t in none if t.startswith(f"{me}.")]
                free = sum(none[t] for t in judging | paying)
                cheaper = own and sum(none[t] - right[t] for t in own) > -EPS
                if ((judging | paying) and free > -EPS) or cheaper:
                    blamed = max(sorted(judging | paying) or own, key=lambda t: none[t])
                    problem = f"keeping nothing costs nothing though gold was shown ({free:+.3g})"
                    if "free empty selection" not in self._checks():
                        self.found("free empty selection", blamed, problem, moves)
        none, moves = seen((), JUNK, ())
        for term, value in none.items():
            if value > EPS and term.startswith(f"{me}."):
                problem = f"keeping nothing is paid where nothing was worth keeping ({value:+.3g})"
                self.found("free empty selection", term, problem, moves)

    def loops(self) -> None:
        """Going round once more is not paid: the same again, something else, gold let go to be found again."""
        k, again = self.cast.k, min(self.cast.max_hops, ROUNDS) - 1
        end = [ask(), answer(BRIDGE.answers[0])]
        one = [ask(FIRST), find("a"), keep("a")]
        rounds: dict[str, list[Move]] = {
            "asking the same again": [ask(FIRST), find("a"), keep()],
            "asking for something else": [ask(OTHER), find(*JUNK[:k]), keep()],
            "asking for much": [ask(*(OTHER, FIRST)[: self.cast.max_queries]), find(*JUNK[:k]), keep()],
            "keeping what does not help": [ask(OTHER), find(*JUNK[:k]), keep(*JUNK[:k])],
        }
        base = self._earned([*one, *end])
        for what, extra in rounds.items():
            moves = [*one, *extra * again, *end]
            for term, value in self._earned(moves).items():
                if value > base.get(term, 0.0) + EPS:
                    problem = f"{what} is paid each time: {value:.3g} instead of {base.get(term, 0.0):.3g}"
                    self.found("farmed by loops", term, problem, moves)
        if self.cast.keeper:
            let_go, other_words = [ask(FIRST), find("a"), keep()], [ask(f"where {FIRST}"), find("a"), keep("a")]
            between, second = [ask(OTHER), find("x"), keep()], [ask(SECOND), find("b"), keep("b")]
            both = self._earned([*one, *second, *end])
            for without, dropped in (
                (base, [*let_go, *one]),
                (base, [*let_go, *other_words]),
                *([(base, [*let_go, *between, *one])] if again > 1 else []),
                *([(both, [*one, ask(SECOND), find("b"), keep(), *second])] if again > 1 else []),
            ):
                for term, value in self._earned([*dropped, *end]).items():
                    known = self._blamed("farmed by loops") | self._blamed("dropped and asked again")
                    if value > without.get(term, 0.0) + EPS and term not in known:
                        problem = (
                            f"gold that was let go is paid again when it is found again: {value:.3g} instead of "
                            f"{without.get(term, 0.0):.3g}; count what is new against what was retrieved, not what was "
                            f"kept"
                        )
                        self.found("dropped and asked again", term, problem, [*dropped, *end])

    def _earned(self, moves: Sequence[Move]) -> dict[str, float]:
        """Positive process values, summed over an episode, and the team's."""
        episode = self.score(BRIDGE, moves)
        out = {f"team.{k}": v for k, v in episode.team.items()}
        for d, terms in zip(episode.decisions, episode.process, strict=True):
            for k, v in terms.items():
                out[f"{d.agent}.{k}"] = out.get(f"{d.agent}.{k}", 0.0) + max(0.0, v)
        return out


# each term by itself


Term = tuple[str, TeamTerm | ProcessTerm, Weight]


def owned(rewards: RewardFunction) -> dict[str, Sequence[Term]]:
    """Return all terms by owner: "team", or an agent."""
    return {"team": rewards.team, **rewards.process}


def values(owner: str, term: TeamTerm | ProcessTerm, episode: Episode) -> list[tuple[float, bool]]:
    """Return (value before weight and hop cap, malformed) of a term: one an episode, or one a decision of its agent."""
    if isinstance(term, TeamTerm):
        return [(float(term.score_episode(episode)), malformed_answer(episode))]
    own = [(i, d.malformed) for i, d in enumerate(episode.decisions) if d.agent == owner and not d.forced]
    return [(float(term.score_decision(episode, i)), malformed) for i, malformed in own]


def paid(owner: str, term: TeamTerm | ProcessTerm, weight: float, episode: Episode) -> list[float]:
    """Return the weighted values of a term; what is malformed is paid nothing, but charged."""
    weighted = [(weight * value, malformed) for value, malformed in values(owner, term, episode)]
    return [min(0.0, value) if malformed else value for value, malformed in weighted]


def each_term(
    rewards: RewardFunction, played: Sequence[Cast], writes: Mapping[str, tuple[str, ...]] | None = None
) -> tuple[list[Finding], set[str]]:
    """Check bounds, reachability and repeats of the terms one by one; the set names those that cannot be scored.

    writes: the state keys of agents that play no part.
    """
    findings: list[Finding] = []
    broken: set[str] = set()
    sums: dict[str, list[float]] = {}  # term -> its weighted value, summed over each episode
    known = set().union(*(cast.played for cast in played)) if played else set()
    writes = writes or {}
    for owner, (name, term, weight) in ((owner, t) for owner, terms in owned(rewards).items() for t in terms):
        own_part = [Cast(other=owner, writes=writes.get(owner, ("text",)))]  # bounds alone
        mine = played if owner == "team" or owner in known else own_part
        stories = [(cast, q, m) for cast in mine for q, m in episodes_of(cast)]
        stories += [(seldom, BRIDGE, [*gather(cast), answer(WRONG)]) for cast in mine for seldom in rare(cast)]
        beyond = [(replace(cast, logprob=-30.0), q, m) for cast in mine for q, m in oversized(cast)]
        told_as, column, fires = f"{owner}.{name}", list[float](), False
        for n, (cast, question, moves) in enumerate([*stories, *beyond]):
            episode, said = tell(question, moves, cast), f"{question.id} question: {told(moves, cast)}"
            try:
                got = values(owner, term, episode)
            except Exception as e:  # the boundary: a term may be a user's
                problem = f"fails with {type(e).__name__}: {e}; it must give a number for every episode"
                findings.append(Finding("fails", told_as, problem, said))
                broken.add(told_as)
                break
            wild = next((v for v, _ in got if not abs(v) <= 1 + EPS), None)
            if wild is not None:
                problem = f"is {wild:.6g} before its weight, outside [-1, 1]; divide by a cap, or clip it"
                findings.append(Finding("unbounded", told_as, problem, said))
                break
            if n < len(stories):
                told_paid = paid(owner, term, weight.start or weight.end, episode)
                fires |= any(told_paid)
                if not any(m.malformed for m in moves):  # what becomes of those is not the term's doing
                    column.append(sum(told_paid))
        else:
            if owner != "team" and owner not in known:
                continue
            sums[told_as] = column
            if stories and not fires and (weight.start or weight.end):
                what = "penalty" if weight.start < 0 or weight.end < 0 else "term"
                problem = f"a {what} that can never fire: it is 0 in all {len(stories)} episodes this graph can play"
                findings.append(Finding("never fires", told_as, problem, "all canonical outputs of every agent"))
            if isinstance(term, ProcessTerm) and not term.per_hop and fires:
                findings += _sums(told_as, owner, term, stories)
    for one, other in combinations(sums, 2):
        sides = {one.partition(".")[0], other.partition(".")[0]}
        if (len(sides) == 1 or "team" in sides) and _same(sums[one], sums[other]):  # who gets both gets it twice
            problem = f"moves with {one} in every episode, up to a factor; keep one, with the sum of both weights"
            findings.append(Finding("same term", other, problem, "all canonical outputs of every agent"))
    return findings, broken


def _sums(
    told_as: str, owner: str, term: ProcessTerm, stories: Sequence[tuple[Cast, Question, list[Move]]]
) -> list[Finding]:
    for cast, question, moves in stories:
        total = sum(max(0.0, v) for v, malformed in values(owner, term, tell(question, moves, cast)) if not malformed)
        if total > 1 + EPS:
            problem = (
                f"adds up to {total:.3g} over one episode; it needs `per_hop = True`, or gains that telescope to 1"
            )
            return [Finding("farmed by loops", told_as, problem, f"{question.id} question: {told(moves, cast)}")]
    return []


def _same(x: Sequence[float], y: Sequence[float]) -> bool:
    """True where one is a multiple of the other, up to a constant that no agent can change."""
    a, b = (np.array(v) - np.mean(v) for v in (x, y))
    if len(a) != len(b) or not np.abs(a).max(initial=0.0) > EPS or not np.abs(b).max(initial=0.0) > EPS:
        return False
    factor = float(a @ b) / float(b @ b)
    return bool(np.allclose(a, factor * b, atol=1e-9))


def breakpoints(rewards: RewardFunction) -> list[int]:
    """Return where schedules end: between two of them every weight is a line, so what is wrong shows at an end."""
    weights = [w for terms in (rewards.team, *rewards.process.values()) for _, _, w in terms]
    return sorted({w.episodes for w in (*weights, rewards.format) if w.start != w.end})


def lint(config: Config) -> list[Finding]:
    """Return what is wrong with the rewards of a config, each term and check once."""
    declared = declare_config(config)
    rewards = config_rewards(config, declared.names, config.graph.max_hops)
    played = casts(declared, config.graph.max_hops, config.llm.max_context)
    findings, broken = each_term(rewards, played, {a.name: tuple(a.writes) for a in declared.agents})
    sound = replace(
        rewards,
        team=tuple(t for t in rewards.team if f"team.{t[0]}" not in broken),
        process={
            a: tuple(t for t in terms if f"{a}.{t[0]}" not in broken) for a, terms in rewards.process.items()
        },
    )  # fmt: skip
    for cast in played:
        for done in (0, *breakpoints(sound), LATE):
            try:
                findings += Linter(sound, cast, done).run()
            except TrainingError as e:
                findings.append(Finding("fails", "team", str(e), "a canonical episode"))
    once: dict[tuple[str, str], Finding] = {}
    for f in findings:
        once.setdefault((f.check, f.term), f)
    return list(once.values())

"""The world: a generated corpus whose questions need a rewriter, a retriever, a filter and an answerer.

One seed gives everything. Facts of one entity are spread over several passages; names share words; twins tell a
withdrawn or outdated value; aliases are told in one passage only and then used in questions; questions are asked
in paraphrase banks whose content words occur in no passage. Names are split by hash into disjoint pools, so that two
worlds of different pools share no full name and no fact.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from jointrag.data import lexicon as lx
from jointrag.data.errors import ConfigError, DataError
from jointrag.data.types import UNKNOWN, Passage, Question, Twin

POOLS = ("trunk", "train", "dev", "test")  # disjoint pools of names
RELATION = {r.name: r for r in lx.RELATIONS}
GROUP = {g.name: g for g in lx.GROUPS}
GROUP_RELATIONS = {g.name: tuple(r for r in lx.RELATIONS if r.group == g.name) for g in lx.GROUPS}
SUBJECT = {r.name: GROUP[r.group].subject for r in lx.RELATIONS}
ENTITY_TYPES = ("person", "place", "work", "company")


class Mix(BaseModel):
    """Shares of the question kinds; they are normalised to sum to 1."""

    model_config = ConfigDict(extra="forbid")
    one: float = Field(default=0.10, ge=0)  # the easy tail: one fact
    bridge: float = Field(default=0.34, ge=0)  # two facts, the bridge entity absent from the question
    three: float = Field(default=0.06, ge=0)  # three facts
    alias: float = Field(default=0.30, ge=0)  # one fact, the entity named by its alias
    alias_bridge: float = Field(default=0.04, ge=0)  # two facts, the first entity named by its alias
    which: float = Field(default=0.02, ge=0)  # comparison by look-up: needs two queries
    same: float = Field(default=0.01, ge=0)  # yes or no
    older: float = Field(default=0.01, ge=0)  # comparison of dates
    missing: float = Field(default=0.06, ge=0)  # unanswerable: the one fact is told nowhere
    missing_bridge: float = Field(default=0.06, ge=0)  # unanswerable: the second fact is told nowhere


class WorldSpec(BaseModel):
    """The knobs of a world (config key `data.world`)."""

    model_config = ConfigDict(extra="forbid")
    seed: int = 11
    passages: int = Field(
        default=2000, ge=500, le=1_000_000
    )  # per world: training, dev and held-out world are one each
    train_questions: int = Field(default=2000, ge=1)
    dev_questions: int = Field(default=300, ge=1)
    test_questions: int = Field(default=1000, ge=1)
    facts_told: float = Field(
        default=0.8, gt=0, le=1
    )  # share of an entity's passages that exist: the rest is unanswerable
    twins: float = Field(default=0.3, ge=0, le=1)  # share of passages with a withdrawn twin
    dated: float = Field(default=0.15, ge=0, le=1)  # share of twins told apart by dates instead of cue words
    aliases: float = Field(default=0.3, ge=0, le=1)  # share of people with an alias passage
    name_pool: float = Field(
        default=0.5, gt=0, le=1
    )  # share of the lexicon in use: smaller = more near-name collisions
    mix: Mix = Mix()


def pool_of(name: str) -> str:
    """Return the pool a full name belongs to: a hash, so that worlds of different pools share no full name."""
    return POOLS[hashlib.sha256(name.encode()).digest()[0] % len(POOLS)]


@dataclass(frozen=True, slots=True)
class Fact:
    """subject --relation--> value, told in passage `passage`."""

    subject: str
    relation: str
    value: str
    passage: str


@dataclass(slots=True)
class World:
    """A corpus with the facts its passages tell."""

    spec: WorldSpec
    pool: str
    passages: list[Passage] = field(default_factory=list)
    entities: dict[str, list[str]] = field(default_factory=dict)  # type -> names
    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)  # (subject, relation) -> true fact
    twins: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)  # gold id -> (twin id, relation->value)
    wording: dict[str, int] = field(default_factory=dict)  # passage id -> wording used
    by_id: dict[str, Passage] = field(default_factory=dict)


def _names(kind: str, count: int, pool: str, share: float, rng: random.Random) -> list[str]:
    """Draw `count` distinct names of `kind` from `pool`; a word is added where shorter names run out."""
    heads: Sequence[str] = lx.GIVEN if kind == "person" else lx.STEM
    tails: Sequence[str] = lx.FAMILY if kind == "person" else lx.KIND_WORDS[kind]
    heads = rng.sample(heads, max(2, round(share * len(heads))))
    if kind == "person":
        tails = rng.sample(tails, max(2, round(share * len(tails))))
    names: dict[str, None] = {}
    tries, middle, left = 0, 0, 8 * len(heads) * len(tails)
    while len(names) < count:
        tries += 1
        if tries > left:  # few names of this length are left: one word more
            middle, left = middle + 1, left + len(heads) * len(tails) * len(lx.FAMILY) ** (middle + 1)
        name = " ".join([rng.choice(heads), *(rng.choice(lx.FAMILY) for _ in range(middle)), rng.choice(tails)])
        if pool_of(name) == pool:
            names[name] = None
    return list(names)


def generate(spec: WorldSpec, pool: str, seed: int | None = None, passages: int | None = None) -> World:
    """Return the world of `spec` in name pool `pool`; deterministic in (spec, pool, seed)."""
    if pool not in POOLS:
        raise ConfigError(f"unknown name pool {pool!r}; expected one of {POOLS}")
    seed = spec.seed if seed is None else seed
    size = spec.passages if passages is None else passages
    rng = random.Random(f"{seed}/{pool}")
    world = World(spec, pool)
    per_entity = 4.4 * spec.facts_told * (1 + spec.twins)  # passages an average entity brings, aliases aside
    shares = {"person": 0.5, "place": 0.2, "work": 0.15, "company": 0.15}
    mean_groups = sum(s * sum(g.subject == t and g.name != "alias" for g in lx.GROUPS) for t, s in shares.items())
    count = size / (per_entity / 4.4 * mean_groups + shares["person"] * spec.aliases)
    for kind, share in shares.items():
        world.entities[kind] = _names(kind, max(4, round(share * count * 1.15)), pool, spec.name_pool, rng)
    aliases = _names("alias", len(world.entities["person"]), pool, spec.name_pool, rng)

    def value(relation: lx.Relation, subject: str, unlike: str = "") -> str:
        """Draw a value for `relation`, never the subject itself nor `unlike`."""
        choices: Sequence[str] = (
            lx.JOBS
            if relation.object == "job"
            else lx.YEARS
            if relation.object == "year"
            else world.entities[relation.object]
        )
        while True:
            v = rng.choice(choices)
            if v not in (subject, unlike):
                return v

    drafts: list[tuple[str, str, dict[str, str], str, str]] = []  # title, group, values, cue, key of the gold draft
    order = [(kind, name) for kind in ENTITY_TYPES for name in world.entities[kind]]
    rng.shuffle(order)
    alias_of = dict(zip(world.entities["person"], aliases, strict=True))
    for kind, name in order:
        if len(drafts) >= size:
            break
        for group in lx.GROUPS:
            if group.subject != kind:
                continue
            if rng.random() >= (spec.aliases if group.name == "alias" else spec.facts_told):
                continue
            if group.name == "alias":
                drafts.append((name, group.name, {"alias": alias_of[name]}, "", ""))
                continue
            true = {r.name: value(r, name) for r in GROUP_RELATIONS[group.name]}
            twin = rng.random() < spec.twins
            dated = twin and rng.random() < spec.dated
            early, late = sorted(rng.sample(lx.YEARS, 2))
            drafts.append((name, group.name, true, lx.DATED[0].format(year=late) if dated else "", ""))
            if twin:
                false = {r.name: value(r, name, true[r.name]) for r in GROUP_RELATIONS[group.name]}
                cue = lx.DATED[0].format(year=early) if dated else rng.choice(lx.RETRACTED)
                drafts.append((name, group.name, false, cue, "twin"))
    while len(drafts) > size:  # a twin never outlives its gold passage
        drafts.pop()
    ids = [f"{pool}{i:06d}" for i in range(len(drafts))]
    rng.shuffle(ids)
    for i, (title, told, values, cue, twin_mark) in enumerate(drafts):
        pid = ids[i]
        variant = rng.randrange(len(GROUP[told].wordings))
        text = GROUP[told].wordings[variant].format(*values.values())
        world.by_id[pid] = Passage(pid, title, f"{cue} {text}".strip())
        world.wording[pid] = variant
        if twin_mark:
            world.twins[ids[i - 1]] = (pid, values)
        else:
            for relation, v in values.items():
                world.facts[title, relation] = Fact(title, relation, v, pid)
    world.passages = [world.by_id[pid] for pid in sorted(world.by_id)]
    titles = {p.title for p in world.passages}
    world.entities = {k: [n for n in v if n in titles] for k, v in world.entities.items()}
    return world


def noun_phrase(relations: Sequence[str], subject: str, bank: int) -> str:
    """Return e.g. "home of the teacher of X" for relations (teacher, home) asked in `bank`."""
    phrase = f"{RELATION[relations[0]].banks[bank]} of {subject}"
    for name in relations[1:]:
        phrase = f"{RELATION[name].banks[bank]} of the {phrase}"
    return phrase


def relations_from(kind: str, to_entity: bool) -> list[str]:
    """Return relations whose subject is of type `kind`; with `to_entity` only those that lead to an entity."""
    return [
        r.name
        for r in lx.RELATIONS
        if SUBJECT[r.name] == kind and r.name != "alias" and (not to_entity or r.object in ENTITY_TYPES)
    ]


class QuestionMaker:
    """Draws questions of every kind about one world, each checked to follow from its gold passages."""

    def __init__(self, world: World, banks: Sequence[int], seed: int) -> None:
        self.world, self.banks = world, tuple(banks)
        self.rng = random.Random(f"questions/{seed}/{world.pool}")
        self.kind_of = {n: k for k, names in world.entities.items() for n in names}
        self.aliases = {s: f for (s, r), f in world.facts.items() if r == "alias"}

    def _chain(self, start: str, length: int, missing_last: bool) -> list[Fact | str] | None:
        """Walk `length` facts from `start`; the last one is untold (its relation name) with `missing_last`."""
        chain: list[Fact | str] = []
        here = start
        for i in range(length):
            last = i == length - 1
            options = relations_from(self.kind_of.get(here, ""), to_entity=not last)
            if last and missing_last:
                options = [r for r in options if (here, r) not in self.world.facts]
                return [*chain, self.rng.choice(options)] if options else None
            options = [r for r in options if (here, r) in self.world.facts]
            if not options:
                return None
            fact = self.world.facts[here, self.rng.choice(options)]
            chain.append(fact)
            here = fact.value
        return chain

    def _twins(self, facts: Sequence[Fact]) -> tuple[Twin, ...]:
        """Return the twins of the gold passages with the answer each leads to (only the last fact's is a value)."""
        out = []
        for i, fact in enumerate(facts):
            if fact.passage in self.world.twins:
                twin_id, values = self.world.twins[fact.passage]
                out.append(Twin(fact.passage, twin_id, values[fact.relation] if i == len(facts) - 1 else ""))
        return tuple(out)

    def draw(self, kind: str, qid: str) -> Question:
        """Return one question of `kind`; retries until the world holds one (DataError after 10,000 tries)."""
        for _ in range(10_000):
            question = self._compare(kind, qid) if kind in ("which", "same", "older") else self._path(kind, qid)
            if question is not None:
                return question
        raise DataError(
            f"this world holds no {kind!r} question; expected at least one: use more passages or a smaller share"
        )

    def _path(self, kind: str, qid: str) -> Question | None:
        length = {"one": 1, "bridge": 2, "three": 3, "alias": 1, "alias_bridge": 2, "missing": 1, "missing_bridge": 2}[
            kind
        ]
        by_alias, missing = kind.startswith("alias"), kind.startswith("missing")
        start = self.rng.choice(list(self.aliases) if by_alias else list(self.kind_of))
        chain = self._chain(start, length, missing)
        if chain is None:
            return None
        facts = [f for f in chain if isinstance(f, Fact)]
        names = [start, *(f.value for f in facts)]
        if len(set(names)) < len(names):
            return None  # a loop would make the question easier than its hops
        bank = self.rng.choice(self.banks)
        relations = [f.relation if isinstance(f, Fact) else f for f in chain]
        mention = self.aliases[start].value if by_alias else start
        gold = ([self.aliases[start].passage] if by_alias else []) + [f.passage for f in facts]
        queries = ([(mention,)] if by_alias else []) + [
            (noun_phrase([r], n, bank),) for r, n in zip(relations, names, strict=False)
        ]
        text = lx.ASK[bank].format(noun_phrase(relations, mention, bank))
        answer = UNKNOWN if missing else facts[-1].value
        twins = () if missing else self._twins(facts)
        return Question(qid, text, (answer,), tuple(gold), tuple(queries), twins, length + by_alias, kind)

    def _compare(self, kind: str, qid: str) -> Question | None:
        relation = (
            "year"
            if kind == "older"
            else self.rng.choice([r.name for r in lx.RELATIONS if r.name not in ("alias", "year", "job")])
        )
        holders = [n for n in self.world.entities[SUBJECT[relation]] if (n, relation) in self.world.facts]
        if len(holders) < 2:
            return None
        if kind == "same" and self.rng.random() < 0.5:  # half of the yes/no questions are true
            sharing: dict[str, list[str]] = {}
            for n in holders:
                sharing.setdefault(self.world.facts[n, relation].value, []).append(n)
            holders = self.rng.choice([g for g in sharing.values() if len(g) > 1] or [holders])
        a, b = self.rng.sample(holders, 2)
        fa, fb = self.world.facts[a, relation], self.world.facts[b, relation]
        bank = self.rng.choice(self.banks)
        noun = RELATION[relation].banks[bank]
        if kind == "same":
            text, answer = lx.SAME[bank].format(a=a, b=b, rel=noun), "yes" if fa.value == fb.value else "no"
        elif fa.value == fb.value:
            return None
        elif kind == "which":
            text = lx.WHICH[bank].format(a=a, b=b, rel=noun, value=fa.value)
            answer = a
            if self.rng.random() < 0.5:
                text = lx.WHICH[bank].format(a=b, b=a, rel=noun, value=fa.value)
        else:
            text, answer = lx.OLDER[bank].format(a=a, b=b), a if fa.value < fb.value else b
        queries = ((noun_phrase([relation], a, bank), noun_phrase([relation], b, bank)),)
        twins = tuple(
            Twin(f.passage, self.world.twins[f.passage][0], "") for f in (fa, fb) if f.passage in self.world.twins
        )
        return Question(qid, text, (answer,), (fa.passage, fb.passage), queries, twins, 2, kind)

    def make(self, count: int, mix: Mix, prefix: str) -> list[Question]:
        """Return `count` distinct questions whose kinds follow `mix` exactly (largest remainders), shuffled."""
        weights = {k: v for k, v in mix.model_dump().items() if v > 0}
        if not weights:
            raise ConfigError("data.world.mix: every share is 0; expected at least one share above 0")
        total = sum(weights.values())
        exact = {k: count * w / total for k, w in weights.items()}
        counts = {k: int(x) for k, x in exact.items()}
        for k in sorted(exact, key=lambda k: counts[k] - exact[k])[: count - sum(counts.values())]:
            counts[k] += 1
        kinds = [k for k, c in counts.items() for _ in range(c)]
        self.rng.shuffle(kinds)
        seen: set[str] = set()
        out: list[Question] = []
        for i, kind in enumerate(kinds):
            for attempt in range(200):
                question = self.draw(kind, f"{prefix}{i:05d}")
                if question.question not in seen or attempt == 199:  # a small world may repeat a question
                    break
            seen.add(question.question)
            check_question(self.world, question)
            out.append(question)
        return out


def read_passage(passage: Passage) -> tuple[str, dict[str, str]]:
    """Return (cue, {relation: value}) read back from a passage's text alone: the inverse of the wordings."""
    import re

    for group in lx.GROUPS:
        for wording in group.wordings:
            pattern = re.escape(wording).replace(r"\{0\}", "(.+?)").replace(r"\{1\}", "(.+?)")
            match = re.fullmatch(rf"(?:(.+? :) )?{pattern}", passage.text)
            if match:
                cue, *values = match.groups()
                return cue or "", {r.name: v for r, v in zip(GROUP_RELATIONS[group.name], values, strict=True)}
    raise DataError(f"passage {passage.id!r} is no wording of this world: {passage.text!r}")


def _compared(question: Question, titles: Sequence[str], told: dict[tuple[str, str], str]) -> str | None:
    """Return the answer of a comparison between two titles, from the facts told; None where there is none."""
    if len(titles) != 2:
        return None
    values = {r: [told[t, r] for t in titles] for _, r in told if all((t, r) in told for t in titles)}
    nouns = [q.split(" of ", 1)[0] for hop in question.gold_queries for q in hop]
    compared = next((v for r, v in values.items() if any(noun in RELATION[r].banks for noun in nouns)), None)
    if compared is None:
        return None
    if question.kind == "same":
        return "yes" if compared[0] == compared[1] else "no"
    if question.kind == "older":
        return titles[compared.index(min(compared))]
    rest = question.question
    for t in titles:
        rest = rest.replace(t, "", 1)
    having = [t for t, v in zip(titles, compared, strict=True) if v in rest]
    return having[0] if len(having) == 1 else None


def check_question(world: World, question: Question) -> None:
    """Raise DataError unless the answer follows from the text of the gold passages and of nothing else."""
    told: dict[tuple[str, str], str] = {}
    for pid in question.supporting_ids:
        cue, values = read_passage(world.by_id[pid])
        if cue in lx.RETRACTED:
            raise DataError(f"question {question.id!r}: gold passage {pid!r} is withdrawn")
        told.update({(world.by_id[pid].title, r): v for r, v in values.items()})
    if question.kind in ("which", "same", "older"):
        ok = _compared(question, [world.by_id[i].title for i in question.supporting_ids], told) == question.answers[0]
    else:
        names = {v: s for (s, r), v in told.items() if r == "alias"}
        here: str | None = None
        for (query,) in question.gold_queries:
            for bank in range(lx.BANKS):
                hit = [r for r in lx.RELATIONS if query.startswith(f"{r.banks[bank]} of ")]
                if hit:
                    relation = hit[0].name
                    subject = query.removeprefix(f"{hit[0].banks[bank]} of ")
                    here = told.get((names.get(subject, subject), relation))
                    if here is None and (subject, relation) in world.facts:
                        raise DataError(f"question {question.id!r}: {query!r} is told, but not in a gold passage")
                    break
        ok = (here or UNKNOWN) == question.answers[0]
    if not ok:
        raise DataError(f"question {question.id!r} does not follow from its gold passages {question.supporting_ids}")


@dataclass(frozen=True, slots=True)
class WorldData:
    """Everything one seed gives: one corpus of three worlds, and the question sets of each split."""

    passages: list[Passage]
    train: list[Question]
    dev: list[Question]
    test: list[Question]
    held_out_bank: list[Question]  # the test world asked in the paraphrase bank no head has seen


def build(spec: WorldSpec) -> WorldData:
    """Return corpus and splits: train, dev and test are worlds that share no full name and no fact."""
    worlds = {pool: generate(spec, pool) for pool in ("train", "dev", "test")}
    seen = tuple(b for b in range(lx.BANKS) if b != lx.HELD_OUT_BANK)
    sizes = {"train": spec.train_questions, "dev": spec.dev_questions, "test": spec.test_questions}
    splits = {p: QuestionMaker(w, seen, spec.seed).make(sizes[p], spec.mix, f"{p}-") for p, w in worlds.items()}
    held_out = QuestionMaker(worlds["test"], (lx.HELD_OUT_BANK,), spec.seed).make(sizes["test"], spec.mix, "bank-")
    passages = [p for w in worlds.values() for p in w.passages]
    return WorldData(passages, splits["train"], splits["dev"], splits["test"], held_out)

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from jointrag.data import lexicon as lx
from jointrag.data.errors import ConfigError, DataError
from jointrag.data.types import UNKNOWN
from jointrag.data.world import (
    POOLS,
    Mix,
    QuestionMaker,
    World,
    WorldData,
    WorldSpec,
    build,
    check_question,
    generate,
    pool_of,
    read_passage,
)

SPEC = WorldSpec(passages=600, train_questions=300, dev_questions=100, test_questions=200)
KINDS = tuple(Mix.model_fields)
COMPARISONS = ("which", "same", "older")
NAMES = {
    w.lower()
    for words in (lx.GIVEN, lx.FAMILY, lx.STEM, *lx.KIND_WORDS.values(), lx.JOBS, lx.YEARS)
    for w in words
}  # fmt: skip
FUNCTION_WORDS = set(
    "the is of what which name me tell who and have has same to in one with a or more an do does".split()
)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


@pytest.fixture(scope="module")
def data() -> WorldData:
    return build(SPEC)


@pytest.fixture(scope="module")
def world() -> World:
    return generate(SPEC, "train")


# --- one seed gives everything --------------------------------------------------------------------------------------


def test_one_seed_gives_the_same_bytes_and_another_seed_others(data: WorldData) -> None:
    assert build(SPEC) == data
    other = build(SPEC.model_copy(update={"seed": 12}))
    assert not {p.text for p in other.passages[:50]} & {p.text for p in data.passages[:50]}
    assert [q.question for q in other.test] != [q.question for q in data.test]


def test_sizes_are_those_asked_for(data: WorldData) -> None:
    assert len(data.passages) == 3 * 600 == len({p.id for p in data.passages})
    assert [len(x) for x in (data.train, data.dev, data.test, data.held_out_bank)] == [300, 100, 200, 200]
    ids = [q.id for x in (data.train, data.dev, data.test, data.held_out_bank) for q in x]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("passages", [500, 20_000])
@pytest.mark.parametrize("pool", ["test", "trunk"])
def test_small_and_large_worlds_are_full_and_hold_every_kind(passages: int, pool: str) -> None:
    world = generate(WorldSpec(passages=passages), pool)
    assert len(world.passages) == passages == len({p.id for p in world.passages})
    questions = QuestionMaker(world, (0, 1, 2), 0).make(200, Mix(), "q")
    assert {q.kind for q in questions} == set(KINDS)


def test_names_never_run_out() -> None:
    """A tenth of the lexicon has 12 * 12 / 4 names of two words, and 120 times as many of three."""
    world = generate(WorldSpec(passages=60_000, name_pool=0.1, facts_told=0.2), "dev")
    assert len(world.passages) == 60_000
    assert max(len(p.title.split()) for p in world.passages) == 4


# --- worlds apart ---------------------------------------------------------------------------------------------------


def test_pools_share_no_full_name_and_no_fact() -> None:
    worlds = [generate(SPEC, pool) for pool in POOLS]
    names = [{n for ns in w.entities.values() for n in ns} for w in worlds]
    aliases = [{f.value for (_, r), f in w.facts.items() if r == "alias"} for w in worlds]
    for pool, mine in zip(POOLS, names, strict=True):
        assert {pool_of(n) for n in mine} == {pool}
    for i in range(len(POOLS)):
        for j in range(i):
            assert not (names[i] | aliases[i]) & (names[j] | aliases[j])
            assert not worlds[i].by_id.keys() & worlds[j].by_id.keys()


def test_names_of_one_world_nearly_collide() -> None:
    people = generate(SPEC, "train").entities["person"]
    first = [n.split()[0] for n in people]
    assert len(set(first)) < 0.75 * len(people)


def test_an_unknown_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool"):
        generate(SPEC, "tset")


def test_wrong_knobs_are_refused() -> None:
    for wrong in ({"passages": 499}, {"passages": 10**7}, {"twins": 1.5}, {"pasages": 1}, {"mix": {"one": -1}}):
        with pytest.raises(ValidationError):
            WorldSpec(**wrong)  # type: ignore[arg-type]


# --- passages -------------------------------------------------------------------------------------------------------


def test_every_passage_reads_back_as_the_facts_it_tells(world: World) -> None:
    of_twin = {t: values for t, values in world.twins.values()}
    for p in world.passages:
        _, values = read_passage(p)
        if p.id in of_twin:
            assert values == of_twin[p.id]
        else:
            assert all(world.facts[p.title, r].value == v for r, v in values.items())
            assert all(world.facts[p.title, r].passage == p.id for r in values)


def test_twins_are_told_apart_by_cue_words_or_dates_and_by_nothing_else(world: World) -> None:
    dated = 0
    for gold_id, (twin_id, values) in world.twins.items():
        gold, twin = world.by_id[gold_id], world.by_id[twin_id]
        gold_cue, true = read_passage(gold)
        twin_cue, false = read_passage(twin)
        assert gold.title == twin.title and true.keys() == false.keys() == values.keys()
        assert all(true[r] != false[r] for r in true)
        if twin_cue in lx.RETRACTED:
            assert gold_cue == ""
        else:
            dated += 1
            assert re.fullmatch(r"As of \d{4} :", gold_cue)
            assert twin_cue < gold_cue  # the later year holds
    assert 0.2 < len(world.twins) / (600 - len(world.twins)) < 0.4
    assert 0.05 < dated / len(world.twins) < 0.3
    cued = {p.id for p in world.passages if read_passage(p)[0] in lx.RETRACTED}
    assert cued <= {t for t, _ in world.twins.values()}


def test_a_twins_text_is_no_easier_to_find_by_its_id(world: World) -> None:
    """Ids are shuffled: nothing learns that the twin comes after its gold passage."""
    after = sum(twin > gold for gold, (twin, _) in world.twins.items())
    assert 0.3 < after / len(world.twins) < 0.7


def test_an_alias_is_told_in_one_passage_only(world: World) -> None:
    for (name, relation), fact in world.facts.items():
        if relation == "alias":
            assert [p.id for p in world.passages if fact.value in p.text or fact.value in p.title] == [fact.passage]
            assert world.by_id[fact.passage].title == name


def test_facts_of_an_entity_are_spread_over_passages(world: World) -> None:
    people = world.entities["person"]
    passages = [len({f.passage for (s, _), f in world.facts.items() if s == name}) for name in people[:50]]
    assert sum(passages) / len(passages) > 3


# --- questions ------------------------------------------------------------------------------------------------------


def splits(data: WorldData) -> list[Any]:
    return [*data.train, *data.dev, *data.test, *data.held_out_bank]


def test_shares_of_kinds_are_those_required(data: WorldData) -> None:
    """At least 40% two-hop, 10% longer, 10% unanswerable; some of one hop, an easy tail."""
    for split in (data.train, data.dev, data.test, data.held_out_bank):
        n = len(split)
        assert sum(q.hops == 2 for q in split) >= 0.4 * n
        assert sum(q.hops > 2 for q in split) >= 0.1 * n
        assert sum(not q.answerable for q in split) >= 0.1 * n
        assert sum(q.kind == "one" for q in split) >= 0.1 * n


def test_shares_follow_the_mix_exactly(world: World) -> None:
    """3 : 1 of 10 questions is 7.5 and 2.5; the largest remainder takes the odd one."""
    mix = Mix(**{k: 0.0 for k in KINDS} | {"one": 3.0, "bridge": 1.0})
    kinds = [q.kind for q in QuestionMaker(world, (0,), 0).make(10, mix, "q")]
    assert sorted(kinds) in (["bridge"] * 2 + ["one"] * 8, ["bridge"] * 3 + ["one"] * 7)
    with pytest.raises(ConfigError, match="share"):
        QuestionMaker(world, (0,), 0).make(10, Mix(**dict.fromkeys(KINDS, 0.0)), "q")


def test_every_question_follows_from_its_gold_passages(data: WorldData) -> None:
    worlds = {pool: generate(SPEC, pool) for pool in ("train", "dev", "test")}
    for q in splits(data):
        pool = {"train": "train", "dev": "dev", "test": "test", "bank": "test"}[q.id.split("-")[0]]
        check_question(worlds[pool], q)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda q, w: replace(q, answers=("Nobody Else",)),
        lambda q, w: replace(q, supporting_ids=q.supporting_ids[:-1]),
        lambda q, w: replace(q, supporting_ids=(*q.supporting_ids[:-1], w.twins[q.supporting_ids[-1]][0])),
        lambda q, w: replace(q, answers=(UNKNOWN,)),
    ],
    ids=["another answer", "a gold passage too few", "the twin for gold", "told, yet called unanswerable"],
)
def test_the_check_finds_spoilt_questions(spoil: Callable[[Any, World], Any], world: World) -> None:
    questions = QuestionMaker(world, (0, 1, 2), 0).make(200, Mix(), "q")
    twinned = [q for q in questions if q.kind in ("one", "bridge") and q.supporting_ids[-1] in world.twins]
    assert twinned
    for q in twinned:
        with pytest.raises(DataError, match=q.id):
            check_question(world, spoil(q, world))


def test_the_check_recomputes_comparisons(world: World) -> None:
    mix = Mix(**dict.fromkeys(KINDS, 0.0) | dict.fromkeys(COMPARISONS, 1.0))
    for q in QuestionMaker(world, (0, 1, 2), 0).make(60, mix, "q"):
        check_question(world, q)
        wrong = {"yes": "no", "no": "yes"}.get(q.answers[0]) or next(
            world.by_id[i].title for i in q.supporting_ids if world.by_id[i].title != q.answers[0]
        )
        with pytest.raises(DataError, match=q.id):
            check_question(world, replace(q, answers=(wrong,)))


def test_answers_recomputed_from_the_facts_alone(world: World) -> None:
    """An own walk through the facts, by the nouns of the question, from the innermost name outwards."""
    noun = {b: r for r in lx.RELATIONS for b in r.banks}
    alias = {f.value: s for (s, r), f in world.facts.items() if r == "alias"}
    for q in QuestionMaker(world, (0, 1, 2, 3), 1).make(200, Mix(), "q"):
        if q.kind in COMPARISONS:
            continue
        inner = re.sub(r"^(Name|Which is|What is|Tell me) the | [.?]$", "", q.question)
        *nouns, name = inner.split(" of ")
        here: str | None = alias.get(name, name)
        for n in reversed(nouns):
            fact = world.facts.get((here or "", noun[n.removeprefix("the ")].name))
            here = fact.value if fact else None
        assert (here or UNKNOWN) == q.answers[0]


def test_gold_queries_name_one_thing_a_hop_and_are_parallel_to_the_gold(data: WorldData) -> None:
    for q in data.test:
        asked = [x for hop in q.gold_queries for x in hop]
        assert len(q.gold_queries) == (1 if q.kind in COMPARISONS else q.hops)
        assert len(asked) == len(q.supporting_ids) + (not q.answerable)
        assert len(set(q.supporting_ids)) == len(q.supporting_ids)


def test_bridge_entities_are_absent_from_the_question(data: WorldData) -> None:
    by_id = {p.id: p for p in data.passages}
    for q in data.test:
        if q.kind not in COMPARISONS:
            for pid in q.supporting_ids[1:]:
                assert by_id[pid].title not in q.question
            if q.kind.startswith("alias"):
                assert by_id[q.supporting_ids[0]].title not in q.question
        if q.kind not in ("which", "older", "same"):
            assert q.answers[0] not in q.question


def test_half_of_the_yes_no_questions_are_true(world: World) -> None:
    mix = Mix(**dict.fromkeys(KINDS, 0.0) | {"same": 1.0})
    answers = [q.answers[0] for q in QuestionMaker(world, (0, 1), 0).make(120, mix, "q")]
    assert 0.35 < answers.count("yes") / 120 < 0.65


def test_no_content_word_of_a_question_occurs_in_passages_except_names(data: WorldData) -> None:
    told = {w for p in data.passages for w in words(p.text)}
    asked = {w for q in splits(data) for w in words(q.question)}
    assert (asked & told) - NAMES - FUNCTION_WORDS <= {"came", "first"}  # "first year", "came earlier": of dates only


def test_the_held_out_banks_nouns_never_occur_in_other_questions(data: WorldData) -> None:
    held = {r.banks[lx.HELD_OUT_BANK] for r in lx.RELATIONS}
    for q in [*data.train, *data.dev, *data.test]:
        said = f" {q.question.lower()} "
        assert not [noun for noun in held if f" {noun} " in said]
        assert all(not x.startswith(tuple(f"{noun} of " for noun in held)) for hop in q.gold_queries for x in hop)
    trained = {b for r in lx.RELATIONS for b in r.banks[: lx.HELD_OUT_BANK]}
    for q in data.held_out_bank:
        assert not [noun for noun in trained if f" {noun} of " in f" {q.question} "]


def test_each_split_uses_every_training_bank(data: WorldData) -> None:
    for split in (data.train, data.dev, data.test):
        starts = {q.question.split(" the ")[0] for q in split if q.kind not in COMPARISONS}
        assert starts == {"Name", "Which is", "What is"}


def test_twins_of_a_question_lead_to_another_answer(data: WorldData) -> None:
    found = 0
    for q in [*data.train, *data.test]:
        for twin in q.twins:
            assert twin.gold_id in q.supporting_ids and twin.twin_id not in q.supporting_ids
            assert twin.answer not in q.answers
            found += bool(twin.answer)
    assert found > 50


# --- the oracle -----------------------------------------------------------------------------------------------------


def test_the_oracle_pipeline_scores_one(data: WorldData, four: Callable[..., Any]) -> None:
    """BM25, k = 4, a reader's budget of 3, on 200 held-out questions among all three worlds' passages."""
    from jointrag.eval.metrics import f1
    from jointrag.graph.pipeline import Pipeline
    from jointrag.llm.toy import toy_model
    from jointrag.retrieval import build_index

    graph, agents = four(k=4, budget=3)
    pipeline = Pipeline(graph, agents, toy_model(), build_index({"type": "bm25", "dim": 8}, data.passages))
    modes = dict.fromkeys((a.name for a in agents), "oracle")
    for questions in (data.test, data.held_out_bank):
        episodes = pipeline.run(questions, modes=modes)
        wrong = [
            (e.question.kind, e.question.question, e.answer) for e in episodes if f1(e.answer, e.question.answers) < 1
        ]
        assert not wrong

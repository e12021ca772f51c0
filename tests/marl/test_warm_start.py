from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from jointrag.agents.labels import WARM_FORMS
from jointrag.data.errors import ConfigError, DataError
from jointrag.llm.types import Completion, Request
from jointrag.marl import sft
from jointrag.marl import warm_start as ws
from jointrag.marl.sft import train_text_head
from jointrag.marl.warm_start import WarmSettings, labels, likelihood_loss, train_ranking_head

SETTINGS = WarmSettings(questions=24, steps=3, lr=2e-3, projection_lr=4e-4, batch=8, seed=1)
Acts = dict[str, list[tuple[Request, Completion]]]


@pytest.fixture(scope="module")
def pipeline(pipe: Callable[..., Any], four: Callable[..., Any]) -> Any:
    """Four agents with room for whole questions: the toy's tokens are short."""
    graph, agents = four()
    agents[0].action = replace(agents[0].action, max_tokens=200)
    agents[3].action = replace(agents[3].action, max_tokens=40)
    return pipe(graph, agents, max_hops=2)


@pytest.fixture(scope="module")
def acts(pipeline: Any, small: Any) -> dict[str, Acts]:
    """Labels of the first 24 questions by form."""
    return {form: labels(pipeline, small.questions[:24], form) for form in WARM_FORMS}


@pytest.fixture
def blank(pipeline: Any) -> Iterator[Any]:
    """The pipeline with untrained heads, and untrained again afterwards."""
    heads = pipeline.llm.heads
    states = {h: heads.state(h) for h in heads.names}
    yield pipeline
    for h, state in states.items():
        heads.set_state(h, state)


def question_of(pipeline: Any, small: Any, request: Request) -> Any:
    """The question a request was made for: its context ends with it and the trail."""
    text = pipeline.llm.tokenizer.decode(request.context)
    found = [q for q in small.questions[:24] if q.question in text]
    assert found, text
    return max(found, key=lambda q: len(q.question))


@pytest.mark.parametrize("form", WARM_FORMS)
def test_query_labels_hold_the_question_and_gold_titles_and_nothing_else(
    form: str, pipeline: Any, small: Any, acts: dict[str, Acts]
) -> None:
    rewriter = pipeline.agent("rewriter")
    asked = 0
    for request, completion in acts[form]["rewriter"]:
        q = question_of(pipeline, small, request)
        titles = [p.title for p in small.index.passages(q.supporting_ids)]
        legal = {
            "question": {q.question},
            "title": set(titles) | {q.question},  # a question without a gold passage is asked as it is
            "question_title": {f"{q.question} {t}" for t in titles} | {q.question},
        }[form]
        for query in rewriter.action.read(pipeline.llm.template, completion.tokens):
            asked += 1
            assert query in legal
    assert asked > 10


@pytest.mark.parametrize("form", WARM_FORMS)
def test_no_label_holds_a_sub_question(form: str, pipeline: Any, small: Any, acts: dict[str, Acts]) -> None:
    for request, completion in (act for of in acts[form].values() for act in of if act[1].masks):
        q = question_of(pipeline, small, request)
        known = {q.question, *(p.title for p in small.index.passages(q.supporting_ids))}
        subs = {s for queries in q.gold_queries for s in queries}
        assert not any(s in completion.text for s in subs if not any(s in k for k in known))


def test_answer_labels_are_gold_answers(pipeline: Any, small: Any, acts: dict[str, Acts]) -> None:
    """A twin's value follows from the twin, but it is neither a gold passage's nor an answer."""
    texts = set()
    for request, completion in acts["title"]["answerer"]:
        assert completion.text in question_of(pipeline, small, request).answers
        texts.add(completion.text)
    assert len(texts) > 8


def test_a_twin_that_stands_in_for_gold_teaches_no_answer(pipe: Callable[..., Any], four: Any, small: Any) -> None:
    """Of gold and twin one is kept, about half the time the twin: oracles answer by it, labels do not."""
    from jointrag.data.world import Mix, QuestionMaker
    from jointrag.retrieval import build_index

    one = Mix(**(dict.fromkeys(Mix.model_fields, 0.0) | {"one": 1.0}))
    twins = [q for q in QuestionMaker(small.world, (0, 1, 2), 1).make(40, one, "t") if q.twins]
    ids = {i for q in twins for t in q.twins for i in (t.gold_id, t.twin_id)}
    index = build_index({"type": "bm25", "dim": 4}, [p for p in small.world.passages if p.id in ids])
    graph, agents = four(k=1, budget=1)
    agents[3].action = replace(agents[3].action, max_tokens=40)
    pipeline = pipe(graph, agents, index)
    modes = {"rewriter": "oracle", "retriever": "default", "filter": "default", "answerer": "oracle"}
    misled = [
        e
        for e in pipeline.run(twins, modes=modes, oracle_form="title")
        if {p.id for p in e.state["evidence"]} & {t.twin_id for t in e.question.twins}
    ]
    assert misled
    assert all(e.answer == e.question.twins[0].answer for e in misled)
    for q in [e.question for e in misled]:
        taught = {c.text for _, c in labels(pipeline, [q, q], "title")["answerer"]}  # twice: once in each half
        assert taught == set(q.answers)


def test_passage_labels_are_gold_passages(pipeline: Any, small: Any, acts: dict[str, Acts]) -> None:
    for request, completion in acts["title"]["retriever"]:
        gold = question_of(pipeline, small, request).supporting_ids
        assert request.candidates is not None
        assert completion.tokens
        assert {request.candidates.ids[i] for i in completion.tokens} <= set(gold)
    kept = 0
    for request, completion in acts["title"]["filter"]:
        q = question_of(pipeline, small, request)
        text = pipeline.llm.tokenizer.decode(request.context)
        chosen = request.grammar.read(completion.tokens)
        kept += len(chosen)
        gold = small.index.passages(q.supporting_ids)
        assert len(chosen) == sum(p.text in text for p in gold)
    assert kept > 3


@pytest.mark.parametrize("form", WARM_FORMS)
def test_labels_are_legal_under_their_masks_and_read_back_as_they_were_meant(
    form: str, pipeline: Any, acts: dict[str, Acts]
) -> None:
    llm = pipeline.llm
    for agent, of in acts[form].items():
        assert of, agent
        for request, completion in of:
            if not completion.masks:
                assert request.candidates is not None
                assert request.picks >= len(completion.tokens) == len(set(completion.tokens)) > 0
                assert all(request.candidates.legal[i] for i in completion.tokens)
                continue
            assert len(completion.masks) == len(completion.tokens) <= request.grammar.max_tokens
            for t, (token, mask) in enumerate(zip(completion.tokens, completion.masks, strict=True)):
                assert mask == request.grammar.mask(completion.tokens[:t])  # what decoding would apply
                assert bool(llm.legal(mask, t == 0)[token]), (agent, t, completion.text)
            assert completion.tokens[-1] == llm.template.end
            said = pipeline.scheduler().read(pipeline.agent(agent).action, request, completion)
            action = pipeline.agent(agent).action
            written = request.grammar.write(said) if agent == "filter" else action.write(llm.template, said)
            assert written == completion.tokens


def test_labels_are_distinct_and_their_loss_is_finite(pipeline: Any, acts: dict[str, Acts]) -> None:
    for agent, of in acts["title"].items():
        keys = [(r.context, r.suffix, c.tokens) for r, c in of]
        assert len(set(keys)) == len(keys)
        with torch.no_grad():
            assert 0 < float(likelihood_loss(pipeline, of, agent)) < 1e4


def test_the_same_questions_give_the_same_labels(pipeline: Any, small: Any, acts: dict[str, Acts]) -> None:
    again = labels(pipeline, small.questions[:24], "title")
    for agent, of in again.items():
        same = zip(of, acts["title"][agent], strict=True)
        assert all((r.context, c) == (s.context, d) for (r, c), (s, d) in same)


def test_a_label_too_long_to_be_said_is_left_out(pipe: Callable[..., Any], four: Any, small: Any) -> None:
    graph, agents = four()
    agents[0].action = replace(agents[0].action, max_tokens=3)
    short = labels(pipe(graph, agents), small.questions[:8], "question")
    assert all(len(c.tokens) <= 3 for _, c in short["rewriter"])


# training


def test_sft_trainers_loss_is_a_plain_loops_loss(
    blank: Any, acts: dict[str, Acts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step's loss, computed anew one label at a time from the logits of the very weights of that step."""
    losses: list[tuple[float, float]] = []
    inner = sft.HeadTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = inner(self, model, inputs, *args, **kwargs)
        rows = inputs["row"].tolist()
        with torch.no_grad():
            said = [plain_log_likelihood(self.pipeline, self.acts[i], self.head) for i in rows]
        losses.append((float(loss.detach()), -sum(said) / len(said)))
        return loss

    monkeypatch.setattr(sft.HeadTrainer, "compute_loss", compute_loss)
    train_text_head(blank, "answerer", acts["title"]["answerer"], 3, SETTINGS)
    assert len(losses) == 3
    for loss, plain in losses:
        assert loss == pytest.approx(plain, rel=1e-4)


def plain_log_likelihood(pipeline: Any, act: tuple[Request, Completion], head: str) -> float:
    """Log-likelihood of one label, token by token, without chunks or padding."""
    llm, total = pipeline.llm, 0.0
    request, completion = act
    for t, (token, mask) in enumerate(zip(completion.tokens, completion.masks, strict=True)):
        ids = torch.tensor([[*request.suffix, *completion.tokens[:t]]])
        hidden, _ = llm._suffix_pass(
            head, llm._gather([request.context]), torch.tensor([len(request.context)]), ids, torch.ones_like(ids).bool()
        )
        logits = llm._lm_head(hidden[:, -1])[0].masked_fill(~llm.legal(mask, t == 0), float("-inf"))
        total += float(torch.log_softmax(logits / request.temperature, -1)[token])
    return total


def test_sft_trainers_steps_are_a_plain_loops_steps(
    blank: Any, acts: dict[str, Acts], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, of = blank.llm.heads, acts["title"]["answerer"]
    start = heads.state("answerer")
    batches: list[list[int]] = []
    inner = sft.HeadTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append(inputs["row"].tolist())
        return inner(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(sft.HeadTrainer, "compute_loss", compute_loss)
    train_text_head(blank, "answerer", of, 3, SETTINGS)
    trained = heads.state("answerer")
    heads.set_state("answerer", start)
    params = list(heads.named("answerer").values())
    optimizer = torch.optim.AdamW(params, lr=SETTINGS.lr, weight_decay=0.0)
    for i, rows in enumerate(batches):
        optimizer.param_groups[0]["lr"] = SETTINGS.lr * (1 - i / 3)  # a warm-up of one step, then linear to 0
        optimizer.zero_grad()
        likelihood_loss(blank, [of[r] for r in rows], "answerer").backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
    for key, value in heads.state("answerer").items():
        torch.testing.assert_close(value, trained[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("agent", ["rewriter", "retriever", "filter", "answerer"])
def test_supervision_raises_the_likelihood_of_the_labels_and_touches_no_other_head(
    agent: str, blank: Any, acts: dict[str, Acts]
) -> None:
    heads, of = blank.llm.heads, acts["title"][agent][:16]
    others = {h: heads.hash(h) for h in heads.names if h != agent}
    train = train_ranking_head if agent == "retriever" else train_text_head
    before = float(likelihood_loss(blank, of, agent).detach())
    train(blank, agent, of, 6, replace(SETTINGS, lr=1e-2, projection_lr=1e-2))
    assert float(likelihood_loss(blank, of, agent).detach()) < before - 0.1
    assert {h: heads.hash(h) for h in others} == others
    heads.check_trunk()


def test_text_steps_leave_a_shared_heads_ordering_of_passages_alone(pipe: Callable[..., Any], small: Any) -> None:
    from jointrag.marl.warm_start import supervise

    pipeline = pipe(heads="shared")
    acts = labels(pipeline, small.questions[:20], "title")
    blank = pipeline.llm.heads.state("shared")
    supervise(pipeline, acts, 2, SETTINGS)  # leaves a gradient of the ranking behind
    pipeline.llm.heads.set_state("shared", blank)
    supervise(pipeline, {n: a for n, a in acts.items() if n != "retriever"}, 3, SETTINGS)
    after = pipeline.llm.heads.state("shared")
    assert torch.equal(after["extra.projection"], blank["extra.projection"])
    assert not all(torch.equal(after[k], blank[k]) for k in blank)


def test_supervision_repeats_itself(blank: Any, small: Any) -> None:
    heads = blank.llm.heads
    start = {h: heads.state(h) for h in heads.names}
    done = []
    for _ in range(2):
        for h, state in start.items():
            heads.set_state(h, state)
        info = ws.warm_start(blank, small.questions[:12], [], "question", replace(SETTINGS, steps=2))
        done.append((info, {h: heads.hash(h) for h in heads.names}))
    assert done[0] == done[1]


# forms


def test_auto_takes_the_form_that_does_best_on_dev(blank: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, quick = blank.llm.heads, replace(SETTINGS, steps=1)
    start = {h: heads.state(h) for h in heads.names}
    ws.warm_start(blank, small.questions[:8], [], "title", quick)
    title = {h: heads.hash(h) for h in heads.names}
    for h, state in start.items():
        heads.set_state(h, state)
    scores = dict(zip(WARM_FORMS, (0.2, 0.5, 0.4), strict=True))
    left = iter(scores.values())
    monkeypatch.setattr(ws, "mean_f1", lambda *_: next(left))
    info = ws.warm_start(blank, small.questions[:8], small.questions[8:10], "auto", quick)
    assert info["form"] == "title"
    assert info["dev_f1"] == scores
    assert set(info["labels"]) == {"rewriter", "retriever", "filter", "answerer"}
    assert {h: heads.hash(h) for h in heads.names} == title  # each form starts from the blank heads


def test_an_unknown_form_and_questions_without_gold_are_refused(blank: Any, small: Any) -> None:
    with pytest.raises(ConfigError, match=r"warm_start\.forms: got 'sub_question'"):
        ws.warm_start(blank, small.questions, [], "sub_question", SETTINGS)
    bare = [replace(q, supporting_ids=(), answers=("nobody says this",)) for q in small.questions if q.answerable]
    with pytest.raises(DataError, match="no training question has gold passages"):
        ws.warm_start(blank, bare, [], "title", SETTINGS)


def test_a_question_without_gold_passages_is_labelled_by_answer_containment(blank: Any, small: Any) -> None:
    said: list[str] = []
    index = blank.index
    bare = [replace(q, supporting_ids=()) for q in small.questions if q.kind == "one"][:6]
    labelled = ws.choose(index, bare, 6, said.append)
    assert labelled
    for q in labelled:
        (passage,) = index.passages(q.supporting_ids)
        assert q.answers[0].lower() in f"{passage.title} {passage.text}".lower()
    assert said == [
        f"warm start: {len(bare)} questions have no gold passages; {len(labelled)} labelled by answer containment"
    ]
    yes = [replace(bare[0], answers=("yes",))]
    with pytest.raises(DataError):
        ws.choose(index, yes, 1)  # a passage that contains the word "yes" proves nothing


def test_no_more_questions_are_used_than_allowed(blank: Any, small: Any) -> None:
    assert ws.choose(blank.index, small.questions, 7) == small.questions[:7]

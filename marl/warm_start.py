"""Warm start: supervised heads from gold passages and answers, through the very templates and masks of joint training.

Labels are the oracles' actions along the user's own graph, so any graph has them: with the retriever's oracle for
all agents (gold among the passages, in random order), and with the index's own order for the filter and the answerer,
which must meet what they will meet. Text
heads are trained by `trl.SFTTrainer`, the retriever's by the Plackett-Luce likelihood of gold-first orderings. There is
no one right query: `forms: auto` takes the label form whose warm pipeline does best on dev.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jointrag.agents.labels import WARM_FORMS
from jointrag.data.errors import ConfigError, DataError
from jointrag.data.types import Question
from jointrag.eval.metrics import cover_em, f1, normalise
from jointrag.graph.episode import Episode
from jointrag.graph.pipeline import Pipeline
from jointrag.llm.scheduler import stable_seed
from jointrag.llm.types import Completion, Request
from jointrag.retrieval.base import Index

Act = tuple[Request, Completion]


@dataclass(frozen=True)
class WarmSettings:
    """How long and how fast heads are supervised."""

    questions: int
    steps: int
    lr: float
    projection_lr: float
    batch: int
    seed: int


def labels(pipeline: Pipeline, questions: Sequence[Question], form: str) -> dict[str, list[Act]]:
    """Return, per agent, the distinct (request, completion) pairs its oracle gives along the graph."""
    names = [a.name for a in pipeline.agents if a.trainable]
    ranks = [a.name for a in pipeline.agents if "passages" in a.writes]
    selects = [a.name for a in pipeline.agents if "evidence" in a.writes]
    oracle = dict.fromkeys((a.name for a in pipeline.agents), "oracle")
    answers = [n for n in names if "answer" in pipeline.agent(n).writes]
    passes = [
        (oracle, names, questions),
        (oracle | dict.fromkeys(ranks, "default"), selects, questions[::2]),
        (oracle | dict.fromkeys([*ranks, *selects], "default"), answers, questions[1::2]),
    ]
    out: dict[str, dict[Any, Act]] = {n: {} for n in names}
    for modes, wanted, asked in passes:
        if not wanted:
            continue
        for episode in pipeline.run(asked, modes=modes, oracle_form=form, labels=True):
            for d in episode.decisions:
                if d.agent not in wanted or d.request is None or d.completion is None:
                    continue
                if "queries" in d.update and d.agent not in ranks and not episode.question.answerable:
                    continue  # what to ask for a fact told nowhere is not in the gold labels
                if "answer" in d.update and d.update["answer"] not in episode.question.answers:
                    continue  # nor is what a twin says: its value is known to oracles only
                trail = d.observation.trail if d.observation else ()
                if d.agent in selects and len(set(trail)) < len(trail):
                    continue  # the same search again finds the same again: "none" would drown everything else
                key = (d.request.context, d.request.suffix, d.completion.tokens)
                out[d.agent].setdefault(key, (d.request, d.completion))
    return {n: list(acts.values()) for n, acts in out.items()}


def likelihood_loss(pipeline: Pipeline, acts: Sequence[Act], head: str) -> torch.Tensor:
    """Return minus the mean log-likelihood of labelled actions under `head`."""
    total = torch.zeros((), device=pipeline.llm.device)
    for chunk in pipeline.llm.chunks(acts, head=head, size=len(acts)):
        logp, _ = pipeline.llm.evaluate(chunk)
        total = total - logp.sum()
    return total / len(acts)


def train_ranking_head(pipeline: Pipeline, head: str, acts: Sequence[Act], steps: int, s: WarmSettings) -> None:
    """Supervise the retriever's head: maximise the Plackett-Luce likelihood of picking gold first."""
    groups = optimizer_groups(pipeline, head, s.lr / 2, s.projection_lr)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(0.0, 1.0 - i / max(1, steps)))
    generator = torch.Generator().manual_seed(s.seed)
    for _ in range(steps):
        rows = torch.randint(len(acts), (min(s.batch, len(acts)),), generator=generator).tolist()
        loss = likelihood_loss(pipeline, [acts[i] for i in rows], head)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        optimizer.step()
        schedule.step()


def optimizer_groups(pipeline: Pipeline, head: str, lr: float, projection_lr: float) -> list[dict[str, Any]]:
    """Return parameter groups: a zero-initialised projection moves by its rate at once, so it has a small one."""
    named = pipeline.llm.heads.named(head)
    groups = [{"params": [p for k, p in named.items() if k != "extra.projection"], "lr": lr}]
    if "extra.projection" in named:
        groups.append({"params": [named["extra.projection"]], "lr": projection_lr})
    return groups


def supervise(pipeline: Pipeline, by_agent: Mapping[str, Sequence[Act]], steps: int, s: WarmSettings) -> None:
    """Train every head that has labels; agents that share a head share its steps."""
    heads: dict[str, dict[bool, list[Act]]] = {}
    for agent, acts in by_agent.items():
        for act in acts:
            head = heads.setdefault(pipeline.head_of[agent], {True: [], False: []})
            head[act[0].candidates is not None].append(act)
    from jointrag.marl.sft import train_text_head  # trl takes seconds to import, and answering needs none of it

    for name, kinds in heads.items():
        if kinds[False]:
            train_text_head(pipeline, name, kinds[False], steps, s)
        if kinds[True]:
            train_ranking_head(pipeline, name, kinds[True], steps, s)


def mean_f1(
    pipeline: Pipeline,
    questions: Sequence[Question],
    modes: Mapping[str, str] | None = None,
    oracle_form: str = "sub_question",
) -> float:
    """Return the greedy answer F1."""
    return f1_of(pipeline.run(questions, modes=modes, oracle_form=oracle_form))


def f1_of(episodes: Sequence[Episode]) -> float:
    """Return the mean answer F1 of finished episodes."""
    return sum(f1(e.answer, e.question.answers) for e in episodes) / len(episodes)


def containing(index: Index, questions: Sequence[Question], depth: int = 20) -> list[Question]:
    """Return questions without gold passages with a weak label: the best candidate that contains a gold answer.

    Candidates are what the index finds for the question and the answer together. Yes/no answers and answers that no
    candidate contains give no label, and the question is left out.
    """
    copied = [q for q in questions if not {normalise(a) for a in q.answers} & {"yes", "no", ""}]
    out = []
    for q, hits in zip(copied, index.search([f"{q.question} {q.answers[0]}" for q in copied], depth), strict=True):
        for p in index.passages(hits.ids):
            if cover_em(f"{p.title} {p.text}", q.answers):
                out.append(replace(q, supporting_ids=(p.id,)))
                break
    return out


def choose(
    index: Index, questions: Sequence[Question], count: int, say: Callable[[str], None] = lambda _: None
) -> list[Question]:
    """Return the questions a warm start may see, at most `count`: with gold passages, or labelled by containment."""
    bare = [q for q in questions if not q.supporting_ids and q.answerable][:count]
    labelled = {q.id: q for q in containing(index, bare)}
    if bare:
        say(f"warm start: {len(bare)} questions have no gold passages; {len(labelled)} labelled by answer containment")
    usable = [labelled.get(q.id, q) for q in questions if q.id in labelled or q.supporting_ids or not q.answerable]
    if not usable:
        raise DataError(
            "warm_start: no training question has gold passages (supporting_ids), and no retrieved passage contains an "
            "answer; expected some: add supporting_ids, or set warm_start.steps=0 to start from the bare trunk"
        )
    return usable[:count]


def warm_start(
    pipeline: Pipeline,
    train: Sequence[Question],
    dev: Sequence[Question],
    forms: str,
    s: WarmSettings,
    say: Callable[[str], None] = lambda _: None,
    modes: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Leave the heads supervised; return {"form", "dev_f1": {form: F1}, "labels": {agent: count}}.

    `modes`: of agents that act otherwise than by their heads where the forms are compared.
    """
    tried = WARM_FORMS if forms == "auto" else (forms,)
    if any(f not in WARM_FORMS for f in tried):
        raise ConfigError(f"warm_start.forms: got {forms!r}; expected auto or one of {WARM_FORMS}")
    if not any("pending" in a.writes for a in pipeline.agents):
        tried = tried[:1]  # without a rewriter the forms are the same
    heads = pipeline.llm.heads
    own = list(dict.fromkeys(pipeline.head_of.values()))
    blank = {h: heads.state(h) for h in own}
    chosen = choose(pipeline.index, train, s.questions, say)
    scores: dict[str, float] = {}
    states: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    counts: dict[str, dict[str, int]] = {}
    for form in tried:
        for h in own:
            heads.set_state(h, blank[h])
        acts = labels(pipeline, chosen, form)
        counts[form] = {n: len(a) for n, a in acts.items()}
        supervise(pipeline, acts, s.steps, s)
        states[form] = {h: heads.state(h) for h in own}
        scores[form] = mean_f1(pipeline, dev, modes) if len(tried) > 1 else 0.0
        pipeline.llm.forget()
        say(
            f"warm start with {form} labels: dev F1 {scores[form]:.3f}"
            if len(tried) > 1
            else f"warm start with {form} labels"
        )
    best = max(tried, key=lambda f: scores[f])
    for h in own:
        heads.set_state(h, states[best][h])
    return {"form": best, "dev_f1": scores, "labels": counts[best]}


def continue_supervision(
    pipeline: Pipeline, train: Sequence[Question], form: str, steps: int, s: WarmSettings, learning: Collection[str]
) -> None:
    """Go on supervising the warm heads of the agents that joint training moves: the `sft_more` comparison."""
    more = replace(s, seed=stable_seed("sft_more", s.seed) % 2**31)
    acts = labels(pipeline, choose(pipeline.index, train, s.questions), form)
    supervise(pipeline, {n: a for n, a in acts.items() if n in learning}, steps, more)
    pipeline.llm.forget()

"""Train the tiny trunk: a small Llama that reads, copies and follows role markers on worlds of the `trunk` name pool.

    python -m jointrag.lab.train_trunk --out llm/tiny --steps 6000

A sequence is one set of passages followed by many tasks about it (answer, select, ask, stop, say what to look for);
a block mask lets each task see the passages and itself, exactly as at inference. Only the tokens a role emits are
supervised, never the unpredictable names of passages. Copy sequences (a random segment, repeated) fade out early.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jointrag.data import lexicon as lx
from jointrag.data.types import UNKNOWN, Passage, Question
from jointrag.data.world import RELATION, QuestionMaker, World, WorldSpec, generate, noun_phrase, relations_from
from jointrag.llm.template import MARKERS, MAX_ITEMS, Template, marker_tokens
from jointrag.llm.types import Observation

FORMS = {"title": 0.40, "sub_question": 0.25, "statement": 0.15, "question": 0.08, "question_title": 0.12}
KINDS = {"one": 1.5, "bridge": 3, "three": 1.5, "alias": 1.5, "alias_bridge": 1, "which": 1, "same": 0.6, "older": 0.6,
         "missing": 0.8, "missing_bridge": 0.7}  # fmt: skip
POINTING = 3.0  # weight of the tokens of a selection: few beside those of answers, and the slowest to be learnt
SEQUENCE = 256  # tokens a training sequence holds at most: attention over longer ones costs more than it teaches
Task = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids after the passages, supervised ids


def train_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on trunk-pool text, so that any text passes and names cost about a token a word."""
    texts: list[str] = []
    for seed in range(4):
        world = generate(WorldSpec(name_pool=1.0, passages=4000), "trunk", seed=900 + seed)
        texts += [f" {p.title} {p.text}" for p in world.passages]
        maker = QuestionMaker(world, range(lx.BANKS), seed)
        texts += [f" {q.question}" for q in maker.make(3000, world.spec.mix, "t")]
    words = [*lx.GIVEN, *lx.FAMILY, *lx.STEM, *(w for ws in lx.KIND_WORDS.values() for w in ws), *lx.JOBS, *lx.YEARS]
    words += [w for r in lx.RELATIONS for phrase in (*r.banks, *r.fragments) for w in phrase.split()]
    texts += [f" {w}" for w in (*words, UNKNOWN, "yes", "no")] * 40
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=marker_tokens(), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tok.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tok, bos_token=MARKERS.begin, eos_token=MARKERS.end, pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


class Lessons:
    """Draws training sequences: one passage set and the tasks about it."""

    def __init__(self, template: Template, rng: random.Random) -> None:
        self.t, self.rng = template, rng
        self.unknown = 1.0  # share of the tasks answered "unknown" that is kept
        self.pointing = 0.0  # share of the lessons about one name that only ask which passage tells one fact
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Move to a new world, so that no fact can be learnt by heart."""
        spec = WorldSpec(seed=seed, name_pool=self.rng.choice((0.25, 0.5, 1.0)), twins=0.4, dated=0.3)
        self.world: World = generate(spec, "trunk", seed=seed, passages=600)
        self.maker = QuestionMaker(self.world, range(lx.BANKS), seed)
        self.of_title: dict[str, list[Passage]] = {}
        for p in self.world.passages:
            self.of_title.setdefault(p.title, []).append(p)
        self.of_passage: dict[str, list[Any]] = {}
        for f in self.world.facts.values():
            self.of_passage.setdefault(f.passage, []).append(f)
        self.leading_to: dict[str, list[Any]] = {}
        for f in self.world.facts.values():
            if f.value in self.of_title:
                self.leading_to.setdefault(f.value, []).append(f)
        self.twin_ids = {t for t, _ in self.world.twins.values()}

    def _queries(self, q: Question, form: str) -> list[tuple[str, ...]]:
        """Return the queries of every hop of `q` in label form `form`."""
        out: list[tuple[str, ...]] = []
        gold = list(q.supporting_ids)
        for h, subs in enumerate(q.gold_queries):
            if form == "sub_question":
                out.append(subs)
                continue
            if form == "question":
                out.append((q.question,))
                continue
            hop: list[str] = []
            for j, sub in enumerate(subs):
                i = h + j
                mention = sub.split(" of ", 1)[1] if " of " in sub else sub
                if form == "statement" and " of " in sub:
                    noun = sub.split(" of ", 1)[0]
                    relation = next(r for r in lx.RELATIONS if noun in r.banks)
                    v = self.rng.randrange(3)
                    if i < len(gold) and self.rng.random() < 0.5:
                        v = self.world.wording[gold[i]]
                    hop.append(f"{mention} {relation.fragments[v]}")
                elif form == "question_title":
                    hop.append(f"{q.question} {mention}")
                elif form == "title" and h == 0 and q.kind.startswith("alias") and self.rng.random() < 0.5:
                    hop.append(q.question)  # the title is not known yet
                else:
                    hop.append(mention)
            out.append(tuple(hop))
        return out

    def _prompt(self, question: str, trail: Sequence[str], role: str) -> tuple[int, ...]:
        lay, t = self.t.layout, self.t
        ids = [*t.literal(lay.question), *t.text(question)]
        for query in trail:
            ids += [*t.literal(lay.query), *t.text(query)]
        return (*ids, *t.suffix(role, ""))

    def _say(self, *texts: str) -> tuple[int, ...]:
        ids: list[int] = []
        for i, text in enumerate(texts):
            ids += ([*self.t.literal(MARKERS.also)] if i else []) + [*self.t.text(text)]
        return (*ids, self.t.end)

    def _select(self, numbers: Sequence[int]) -> tuple[int, ...]:
        if not numbers:
            return (*self.t.literal(MARKERS.none), self.t.end)
        return (*(i for n in sorted(numbers) for i in self.t.literal(MARKERS.item.format(i=n))), self.t.end)

    def sequence(self, size: int, tasks: int) -> tuple[tuple[int, ...], list[Task]]:
        """Return (passage ids, tasks): at most `size` passages (gold ones first, more than `size` gold never)."""
        rng, w = self.rng, self.world
        while True:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                q = self.maker.draw(kind, "x")
            except Exception:  # a small world may lack a kind
                continue
            if len(q.supporting_ids) <= size:
                break
        gold = list(q.supporting_ids)
        held = gold if rng.random() < 0.75 else rng.sample(gold, rng.randrange(len(gold))) if gold else []
        chosen: dict[str, Passage] = {g: w.by_id[g] for g in held}
        pool: list[Passage] = []
        for g in gold:
            twin = w.by_id[w.twins[g][0]] if g in w.twins else None
            if twin and rng.random() < 0.6 and (g in held or twin.text.startswith(lx.RETRACTED)):
                pool.append(twin)
        related = [p for g in gold for p in self.of_title[w.by_id[g].title]]
        if not related:
            related = list(rng.choice(list(self.of_title.values())))
        rng.shuffle(related)
        pool += related[: rng.randrange(4)] + rng.sample(w.passages, 3)
        target = max(len(chosen), rng.randint(1, size)) if rng.random() > 0.15 else max(1, len(chosen))
        for p in pool:
            if len(chosen) >= target:
                break
            if p.id not in gold or p.id in held:
                chosen.setdefault(p.id, p)
        shown = list(chosen.values())
        rng.shuffle(shown)
        number = {p.id: i for i, p in enumerate(shown, 1)}
        context, _ = self.t.context(Observation("", tuple(shown)), 10_000)
        context = context[: -len(self.t.literal(MARKERS.question)) - len(self.t.text(""))]

        out: list[Task] = []
        form = rng.choices(list(FORMS), list(FORMS.values()))[0]
        hops = self._queries(q, form)
        trail = [x for hop in hops for x in hop]
        complete = len(held) == len(gold)
        asked = trail if rng.random() < 0.8 else [x for hop in self._queries(q, "sub_question") for x in hop]
        answer = q.answers[0] if complete else UNKNOWN
        for t in (asked, asked if rng.random() < 0.5 else []):
            out.append((self._prompt(q.question, t, "answerer"), self._say(answer)))
        h = rng.randrange(len(hops))  # the filter after hop h: gold of the hops asked so far
        so_far = [x for hop in hops[: h + 1] for x in hop]
        reach = gold if len(hops) == 1 else gold[: h + 1]
        out.append(
            (self._prompt(q.question, so_far, "filter"), self._select([number[g] for g in reach if g in number]))
        )
        for h in range(len(hops) + 1):  # the rewriter at every stage
            before = [x for hop in hops[:h] for x in hop]
            reach = gold if len(hops) == 1 else gold[:h]
            if h and not all(g in number for g in reach):
                if rng.random() < 0.3:
                    continue
                missing = next(i for i in range(h) if i >= len(gold) or gold[i] not in number) if len(hops) > 1 else 0
                again = self._queries(q, rng.choices(list(FORMS), list(FORMS.values()))[0])[missing]
                reply = self._say(*again) if rng.random() < 0.3 else (*self.t.literal(MARKERS.stop), self.t.end)
            elif h == len(hops) or (form == "question" and h):
                reply = (*self.t.literal(MARKERS.stop), self.t.end)
            else:
                reply = self._say(*hops[h])
            out.append((self._prompt(q.question, before, "rewriter"), reply))
        h = rng.randrange(len(hops))
        for sub in q.gold_queries[h][:1]:
            if " of " in sub:
                relation = next(r for r in lx.RELATIONS if sub.split(" of ", 1)[0] in r.banks)
                so_far = [x for hop in hops[: h + 1] for x in hop]
                out.append(
                    (self._prompt(q.question, so_far, "retriever"), self._say(relation.fragments[rng.randrange(3)]))
                )
        facts = [f for p in shown for f in self.of_passage.get(p.id, ())]
        rng.shuffle(facts)
        for f in facts[: max(0, tasks - len(out))]:  # every other fact of the context
            bank = rng.randrange(lx.BANKS)
            phrase = noun_phrase([f.relation], f.subject, bank)
            question = lx.ASK[bank].format(phrase)
            query = rng.choice((f.subject, phrase, f"{f.subject} {rng.choice(RELATION[f.relation].fragments)}"))
            t = [] if rng.random() < 0.3 else [query]
            if rng.random() < 0.7:
                out.append((self._prompt(question, t, "answerer"), self._say(f.value)))
            else:
                out.append((self._prompt(question, t or [query], "filter"), self._select([number[f.passage]])))
        if rng.random() < 0.8:  # a fact told nowhere here, perhaps by a withdrawn twin
            told = {(f.subject, f.relation) for f in facts}
            name = rng.choice(shown).title
            options = [r for r in lx.RELATIONS if r.name != "alias" and (name, r.name) not in told
                       and not any(f.subject == name for f in facts if f.relation == r.name)]  # fmt: skip
            same_type = [r for r in options if self.maker.kind_of.get(name) == _subject(r)]
            only_dated = {p.title for p in shown if p.id in self.twin_ids and p.text.startswith("As of")}
            if same_type and name not in only_dated:
                r = rng.choice(same_type)
                bank = rng.randrange(lx.BANKS)
                phrase = noun_phrase([r.name], name, bank)
                question = lx.ASK[bank].format(phrase)
                if rng.random() < 0.6:
                    out.append((self._prompt(question, [phrase], "answerer"), self._say(UNKNOWN)))
                else:
                    out.append((self._prompt(question, [name], "filter"), self._select([])))
        rng.shuffle(out)
        return context, self._fitting(context, out[:tasks])

    def entity(self, size: int, tasks: int) -> tuple[tuple[int, ...], list[Task]]:
        """Return (passage ids, tasks) about one name's passages, twins included: what a search for a title brings.

        Which of them holds the fact wanted depends on the question and on how many searches were made before: the name
        may be asked about itself or be the first, second or third stage of a longer question.
        """
        rng, w = self.rng, self.world
        name = rng.choice(list(self.of_title))
        size = min(size, rng.choice((2, 3, 3, 4)))
        others = rng.sample(w.passages, rng.randrange(3))
        pointing = rng.random() < self.pointing
        pool = [*rng.sample(self.of_title[name], len(self.of_title[name]))[:size], *others]
        shown = list({p.id: p for p in pool}.values())[:size]
        rng.shuffle(shown)
        number = {p.id: i for i, p in enumerate(shown, 1)}
        context, _ = self.t.context(Observation("", tuple(shown)), 10_000)
        context = context[: -len(self.t.literal(MARKERS.question)) - len(self.t.text(""))]
        form = rng.choices(list(FORMS), list(FORMS.values()))[0]
        inbound = self.leading_to.get(name, [])
        wanted = relations_from(self.maker.kind_of.get(name, ""), to_entity=False)
        rng.shuffle(wanted)
        out: list[Task] = []
        for relation in wanted:
            fact = w.facts.get((name, relation))
            if fact is not None and fact.passage not in number:
                twin, _ = w.twins.get(fact.passage, ("", {}))
                if twin in number and w.by_id[twin].text.startswith("As of"):
                    continue  # an older value alone cannot be told from the one that holds
            chain, start = [relation], name
            names = [name]
            for _ in range(2):  # led here by one or two earlier searches
                if pointing or not inbound or rng.random() < 0.4 or len(chain) == 3:
                    break
                before = rng.choice(self.leading_to.get(start, [None]))
                if before is None or before.subject in names:
                    break
                chain, start = [before.relation, *chain], before.subject
                names.insert(0, start)
            at = len(chain) - 1
            leads_on = fact is not None and fact.value in self.maker.kind_of and len(chain) < 3
            if fact is not None and leads_on and not pointing and rng.random() < 0.7:
                chain.append(rng.choice(relations_from(self.maker.kind_of[fact.value], to_entity=False)))
            bank = rng.randrange(lx.BANKS)
            mention = start
            trail: list[str] = []
            alias = w.facts.get((start, "alias"))
            if alias is not None and not pointing and rng.random() < 0.4:
                mention = alias.value
                trail.append(mention)
            question = lx.ASK[bank].format(noun_phrase(chain, mention, bank))
            if trail and form in ("title", "question", "question_title") and rng.random() < 0.5:
                trail = [question]
            for i in range(at + 1):
                trail.append(self._query(form, question, chain[i], names[i], bank))
            there = fact is not None and fact.passage in number
            told = fact.value if there and fact is not None and at == len(chain) - 1 else UNKNOWN
            out.append(
                (self._prompt(question, trail, "filter"),
                 self._select([number[fact.passage]] if there and fact is not None else []))
            )  # fmt: skip
            if pointing:
                continue
            draw = rng.random()
            if there and fact is not None and at < len(chain) - 1:  # read on: the name to look for next
                reply = self._say(self._query(form, question, chain[at + 1], fact.value, bank))
                out.append((self._prompt(question, trail, "rewriter"), reply))
            elif draw < 0.4:
                out.append((self._prompt(question, trail, "answerer"), self._say(told)))
            elif draw < 0.7:
                words = rng.choice(RELATION[relation].fragments)
                out.append((self._prompt(question, trail, "retriever"), self._say(words)))
            elif there:
                stop = (*self.t.literal(MARKERS.stop), self.t.end)
                out.append((self._prompt(question, trail, "rewriter"), stop))
        rng.shuffle(out)
        return context, self._fitting(context, out[:tasks])

    def _query(self, form: str, question: str, relation: str, name: str, bank: int) -> str:
        """Return one query about `relation` of `name` in label form `form`."""
        if form == "question":
            return question
        if form == "question_title":
            return f"{question} {name}"
        if form == "sub_question":
            return noun_phrase([relation], name, bank)
        if form == "statement":
            return f"{name} {self.rng.choice(RELATION[relation].fragments)}"
        return name

    def lesson(self, size: int, tasks: int) -> tuple[tuple[int, ...], list[Task]]:
        """Return a sequence about one question or, as often, about one name's passages."""
        return self.entity(size, tasks) if self.rng.random() < 0.5 else self.sequence(size, tasks)

    def _fitting(self, context: Sequence[int], tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks that fit into the sequence after its passages."""
        room, kept = SEQUENCE - len(context), []
        abstain = self._say(UNKNOWN)
        for prompt, said in tasks:
            if said == abstain and self.rng.random() >= self.unknown:
                continue
            room -= len(prompt) + len(said)
            if room >= 0:
                kept.append((prompt, said))
        return kept

    def copying(self) -> tuple[tuple[int, ...], list[Task]]:
        """Return a random segment followed by spans of it; all but a span's first token is supervised.

        Spans start anywhere: an exact repetition is learnt as attention at a fixed distance, which copies no name.
        """
        first = len(marker_tokens()) + 256
        length = round(3 * 20 ** self.rng.random())  # 3 to 60, short ones often: there the first signal comes from
        segment = [self.rng.randrange(first, len(self.t.tokenizer)) for _ in range(length)]
        tasks: list[Task] = []
        for _ in range(24):
            start = self.rng.randrange(len(segment) - 1)
            span = tuple(segment[start : start + self.rng.randint(2, 6)])
            tasks.append((span[:1], span[1:]))
        return tuple(segment), tasks


def _subject(relation: lx.Relation) -> str:
    return next(g.subject for g in lx.GROUPS if g.name == relation.group)


def collate(items: Sequence[tuple[tuple[int, ...], list[Task]]], pad: int) -> dict[str, torch.Tensor]:
    """Return input_ids, position_ids [B, T], mask [B, 1, T, T] (True = may attend) and labels [B, T] (-100 = none)."""
    lengths = [len(c) + sum(len(p) + len(s) for p, s in tasks) for c, tasks in items]
    size = max(lengths)
    ids = torch.full((len(items), size), pad)
    pos = torch.zeros((len(items), size), dtype=torch.long)
    labels = torch.full((len(items), size), -100)
    block = torch.full((len(items), size), -1)  # 0 = passages, n = task n, -1 = padding
    for b, (context, tasks) in enumerate(items):
        n = len(context)
        ids[b, :n], pos[b, :n], block[b, :n] = torch.tensor(context), torch.arange(n), 0
        at = n
        for k, (prompt, said) in enumerate(tasks, 1):
            m = len(prompt) + len(said)
            ids[b, at : at + m] = torch.tensor((*prompt, *said))
            pos[b, at : at + m] = torch.arange(n, n + m)
            block[b, at : at + m] = k
            start = at + len(prompt)
            labels[b, start - 1 : start - 1 + len(said)] = torch.tensor(said)
            at += m
    same = (block[:, None, :] == 0) | (block[:, None, :] == block[:, :, None])
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    mask = same & causal & (block[:, None, :] >= 0)
    mask |= torch.eye(size, dtype=torch.bool)
    return {"input_ids": ids, "position_ids": pos, "mask": mask[:, None], "labels": labels}


def hidden_states(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states [B, T, H] under the block mask."""
    dtype = model.dtype
    bias = torch.zeros(batch["mask"].shape, dtype=dtype, device=batch["mask"].device)
    bias.masked_fill_(~batch["mask"], torch.finfo(dtype).min)
    out = model.model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=bias, use_cache=False
    )
    hidden: torch.Tensor = out.last_hidden_state
    return hidden


@torch.no_grad()
def give_induction(model: LlamaForCausalLM, seed: int = 0) -> None:
    """Start with one induction circuit: layer 0's first head looks one token back, layer 1's first head copies.

    A name is two words, and its second word is found by "what followed the first word before" (Olsson et al. 2022,
    arXiv 2209.11895). Left to itself a trunk of this size had not formed that circuit after 2,500 steps; everything
    stays trainable. Queries and keys of layer 1 use slow rotary frequencies alone, so that distance does not matter.
    """
    config = model.config
    width, heads = config.hidden_size, config.num_attention_heads
    d = width // heads
    half = d // 2
    generator = torch.Generator().manual_seed(seed)
    frequency = 10_000.0 ** (-torch.arange(half) / half)
    slow = [i for i in range(half) if float(frequency[i]) < 0.01]
    dims = [*slow, *(i + half for i in slow)]
    r = len(dims)
    basis = torch.linalg.qr(torch.randn(width, 2 * r, generator=generator))[0]
    own, before = basis[:, :r].T, basis[:, r:]  # code of a token; where layer 0 writes the code of the one before
    first, second = model.model.layers[0], model.model.layers[1]
    embedding = model.model.embed_tokens.weight
    code = first.input_layernorm(embedding) @ own.T
    sharp = (12.0 * d**0.5) ** 0.5
    look = first.self_attn
    for projection in (look.q_proj, look.k_proj, look.v_proj):
        projection.weight[:d] = 0.0
    look.q_proj.bias[:d], look.k_proj.bias[:d] = 0.0, 0.0
    for i in range(half // 2):  # q . k = sum_f cos(f (distance - 1)): largest one token back
        look.k_proj.bias[i] = sharp
        look.q_proj.bias[i], look.q_proj.bias[i + half] = sharp * frequency[i].cos(), -sharp * frequency[i].sin()
    look.v_proj.weight[:r] = own
    look.o_proj.weight[:, :d] = 0.0
    look.o_proj.weight[:, :r] = before * float(embedding.norm(dim=1).mean()) / r**0.5
    seen: list[torch.Tensor] = []
    hook = second.input_layernorm.register_forward_hook(lambda module, args, out: seen.append(out))
    ids = torch.randint(len(marker_tokens()), len(embedding), (64, 48), generator=generator)
    model.model(ids)
    hook.remove()
    x = seen[0][:, 1:].reshape(-1, width)

    def fitted(target: torch.Tensor) -> torch.Tensor:
        weights: torch.Tensor = torch.linalg.solve(x.T @ x + torch.eye(width), x.T @ target)
        return weights.T

    copy = second.self_attn
    sharp = (24.0 * d**0.5 / r) ** 0.5
    for projection, target in ((copy.q_proj, code[ids[:, 1:]]), (copy.k_proj, code[ids[:, :-1]])):
        projection.weight[:d] = 0.0
        projection.weight[dims] = sharp * fitted(target.reshape(-1, r))
    out = torch.linalg.qr(torch.randn(width, d, generator=generator))[0]
    copy.v_proj.weight[:d] = fitted((embedding[ids[:, 1:]] @ out).reshape(-1, d))
    copy.o_proj.weight[:, :d] = 2.0 * out  # gentle: training scales it where copying pays, louder it drowns the rest


@torch.no_grad()
def exactness(model: LlamaForCausalLM, template: Template, lessons: Lessons, size: int, count: int) -> dict[str, float]:
    """Return, per role, the share of tasks whose every supervised token is the arg max (teacher-forced)."""
    model.eval()  # type: ignore[no-untyped-call]
    right: dict[str, list[float]] = {}
    roles = {template.suffix(r, "")[-1]: r for r in ("rewriter", "retriever", "filter", "answerer")}
    device = next(model.parameters()).device
    for _ in range(0, count, 16):
        items = [lessons.lesson(size, 12) for _ in range(16)]
        batch = {k: v.to(device) for k, v in collate(items, template.tokenizer.pad_token_id).items()}
        guess = model.lm_head(hidden_states(model, batch)).argmax(-1)
        for b, (context, tasks) in enumerate(items):
            at = len(context)
            for prompt, said in tasks:
                i = at + len(prompt) - 1
                ok = guess[b, i : i + len(said)].tolist() == list(said)
                name = roles[prompt[-1]]
                if name == "answerer":
                    n = prompt.count(template.literal(MARKERS.query)[0])
                    name += "_unknown" if said[:-1] == template.text(UNKNOWN) else f"_{min(n, 3)}"
                right.setdefault(name, []).append(float(ok))
                at += len(prompt) + len(said)
    model.train()
    return {k: sum(v) / len(v) for k, v in sorted(right.items())}


def main(argv: Sequence[str] | None = None) -> None:
    """Train tokenizer and trunk, log exactness per role, save every `--save` steps."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("llm/tiny"))
    p.add_argument("--steps", type=int, default=6000)
    p.add_argument("--batch", type=int, default=40)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--vocab", type=int, default=1792)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--copies", type=float, default=0.15, help="share of copy sequences at the start, 0 halfway through")
    p.add_argument("--init", type=Path, help="go on from this trunk instead of random weights")
    p.add_argument("--save", type=int, default=500)
    p.add_argument("--device", default="cpu")
    a = p.parse_args(argv)
    torch.manual_seed(a.seed)
    rng = random.Random(a.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(a.init) if a.init else train_tokenizer(a.vocab)
    template = Template.of(tokenizer)
    sample = [t for q in Lessons(template, rng).world.passages[:200] for t in template.text(q.title)]
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=a.hidden, intermediate_size=int(a.hidden * 2.75),
        num_hidden_layers=a.layers,
        num_attention_heads=4, num_key_value_heads=4, attention_bias=True, max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(a.init) if a.init else LlamaForCausalLM(config)
    if not a.init:
        give_induction(model, a.seed)
    model.to(a.device).float().train()
    size = sum(x.numel() for x in model.parameters())
    print(json.dumps({"parameters": size, "vocab": len(tokenizer), "tokens_per_name": len(sample) / 200}), flush=True)
    decay = [x for x in model.parameters() if x.dim() > 1]
    flat = [x for x in model.parameters() if x.dim() <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": flat, "weight_decay": 0.0}], lr=a.lr, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 100) * max(0.02, 1.0 - max(0.0, s / a.steps - 0.1) / 0.9)
    )
    numbers = [template.literal(MARKERS.item.format(i=i))[0] for i in range(1, MAX_ITEMS + 1)]
    selecting = torch.tensor([*numbers, *template.literal(MARKERS.none)], device=a.device)
    lessons, exam = Lessons(template, rng), Lessons(template, random.Random(12345))
    exam.reset(777_777)
    started, seen = time.time(), 0
    for step in range(a.steps):
        if step % 4 == 0:
            lessons.reset(step + 1)
        passages = 4 if a.init else 2 if step < 0.1 * a.steps else 3 if step < 0.2 * a.steps else 4
        lessons.pointing = 0.6 * (1.0 - step / a.steps)
        lessons.unknown = 1.0 if a.init else min(1.0, max(0.0, step / a.steps - 0.15) / 0.35)  # reading comes first
        copies = a.copies * max(0.0, 1.0 - step / (0.5 * a.steps))
        items = [lessons.copying() if rng.random() < copies else lessons.lesson(passages, 12) for _ in range(a.batch)]
        batch = {k: v.to(a.device) for k, v in collate(items, tokenizer.pad_token_id).items()}
        at = batch["labels"] >= 0
        with torch.autocast(a.device, dtype=torch.bfloat16):  # 1.2-1.4x on a CPU with AVX512-bf16
            logits = model.lm_head(hidden_states(model, batch)[at])
        said = batch["labels"][at]
        weight = torch.where(torch.isin(said, selecting), POINTING, 1.0)
        loss = (torch.nn.functional.cross_entropy(logits.float(), said, reduction="none") * weight).sum() / weight.sum()
        opt.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        seen += batch["input_ids"].numel()
        if step % 50 == 49:
            with torch.no_grad():
                again = collate([exam.copying() for _ in range(8)], tokenizer.pad_token_id)
                labels = again["labels"].to(a.device)
                guess = model.lm_head(hidden_states(model, {k: v.to(a.device) for k, v in again.items()})).argmax(-1)
                copied = (guess == labels)[labels >= 0].float().mean().item()
            rate = seen / (time.time() - started)
            print(
                json.dumps(
                    {
                        "step": step + 1,
                        "loss": round(loss.item(), 4),
                        "copied": round(copied, 3),
                        "tokens_per_s": round(rate),
                    }
                ),
                flush=True,
            )
        if step % a.save == a.save - 1 or step == a.steps - 1:
            scores = {k: round(v, 3) for k, v in exactness(model, template, exam, 4, 160).items()}
            print(
                json.dumps({"step": step + 1, "minutes": round((time.time() - started) / 60, 1), **scores}), flush=True
            )
            model.save_pretrained(a.out)
            tokenizer.save_pretrained(a.out)
    (a.out / "training.json").write_text(json.dumps({**vars(a), "parameters": size}, indent=1, default=str))


if __name__ == "__main__":
    main()

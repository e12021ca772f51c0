from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from jointrag.data.errors import ConfigError, HeadError
from jointrag.llm.actions import FreeText
from jointrag.llm.heads import Heads
from jointrag.llm.model import OTHERS, LanguageModel, load_trunk, uniforms
from jointrag.llm.toy import save_toy, toy_model, toy_tokenizer, toy_trunk
from jointrag.llm.types import Candidates, Completion, Request

Build = Callable[..., LanguageModel]
Ask = Callable[..., list[Request]]
TEXT = ("rewriter", "filter", "answerer", "summariser")
SETTINGS = list(itertools.product(["late", "everywhere"], ["llama", "qwen2"], [True, False]))


def recomputed(lm: LanguageModel, requests: list[Request], done: list[Completion], **options: Any) -> list[list[float]]:
    out: list[list[float]] = [[] for _ in requests]
    for chunk in lm.chunks(list(zip(requests, done, strict=True)), **options):
        logp, entropy = lm.evaluate(chunk)
        assert bool(torch.isfinite(logp).all()) and bool((entropy >= -1e-6).all())
        for b, row in enumerate(chunk.rows):
            out[row] = logp[b, : len(done[row].tokens)].tolist()
            assert not logp[b, len(done[row].tokens) :].any()
    return out


@pytest.mark.parametrize(("activation", "arch", "markers"), SETTINGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recomputed_log_probs_equal_the_sampled_ones(
    build: Build, ask: Ask, activation: str, arch: str, markers: bool, temperature: float
) -> None:
    """Text, selections and rankings in batches of mixed lengths; chunks of other sizes than the batches."""
    lm = build(activation=activation, arch=arch, markers=markers)
    requests = ask(lm, 40, temperature=temperature)
    done = lm.generate(requests)
    assert len({len(c.tokens) for c in done}) > 3
    for size in (0, 3):
        for r, c, logp in zip(requests, done, recomputed(lm, requests, done, size=size), strict=True):
            assert np.allclose(c.logprobs, logp, atol=1e-4), r.role


@pytest.mark.parametrize("activation", ["late", "everywhere"])
def test_a_batch_gives_what_one_at_a_time_gives(build: Build, ask: Ask, activation: str) -> None:
    lm = build(activation=activation)
    for sample in (True, False):
        requests = ask(lm, 40, sample=sample)
        together = lm.generate(requests)
        backwards = lm.generate(requests[::-1])[::-1]
        lm.forget()
        alone = [lm.generate([r])[0] for r in requests]
        for one, many, again in zip(alone, together, backwards, strict=True):
            if not one.near_ties:
                assert one.tokens == many.tokens == again.tokens
                assert np.allclose(one.logprobs, many.logprobs, atol=1e-4)
        assert sum(c.near_ties > 0 for c in alone) <= 4


def test_small_batches_give_what_a_large_one_gives(build: Build, ask: Ask) -> None:
    requests = ask(build(), 40)
    large, small = (build(max_batch=size).generate(requests) for size in (128, 3))
    assert [c.tokens for c in large] == [c.tokens for c in small]


def test_bfloat16_trunks_agree_on_the_mean(build: Build, ask: Ask) -> None:
    lm = build(dtype=torch.bfloat16)
    requests = ask(lm, 60)
    done = lm.generate(requests)
    again = recomputed(lm, requests, done)
    gaps = [abs(a - b) for c, x in zip(done, again, strict=True) for a, b in zip(c.logprobs, x, strict=True)]
    assert float(np.mean(gaps)) <= 0.02
    assert all(p.dtype == torch.float32 for a in lm.heads.names for p in lm.heads.named(a).values())


@pytest.mark.parametrize("activation", ["late", "everywhere"])
@pytest.mark.parametrize("markers", [True, False])
def test_saved_heads_say_the_same_in_plain_peft(
    build: Build, ask: Ask, activation: str, markers: bool, tmp_path: Path
) -> None:
    """Late: PEFT's own activated LoRA, one full forward. Everywhere: plain LoRA. `generate` runs on both."""
    lm = build(activation=activation, markers=markers)
    for agent in ("answerer", "summariser"):
        requests = ask(lm, 6, agents=(agent,), sample=False)
        done = lm.generate(requests)
        marker = lm.template.suffix(agent, "say it")
        lm.heads.save(agent, tmp_path / agent, "f", {agent: marker})
        plain = PeftModel.from_pretrained(toy_trunk(lm.tokenizer), str(tmp_path / agent)).eval()
        for r, c in zip(requests, done, strict=True):
            before = [*r.context, *r.suffix]
            ids = torch.tensor([[*before, *c.tokens[:-1]]])
            with torch.no_grad():
                logits = plain(input_ids=ids).logits[0, len(before) - 1 :]
            for t, (token, logp, mask) in enumerate(zip(c.tokens, c.logprobs, c.masks, strict=True)):
                legal = lm.legal(mask, t == 0)
                theirs = torch.log_softmax(logits[t].masked_fill(~legal, float("-inf")), -1)[token]
                assert abs(float(theirs) - logp) < 1e-4
        legal_at = [lm.legal((True, ()), first).nonzero()[:, 0].tolist() for first in (True, False)]
        out = plain.generate(
            input_ids=torch.tensor([before]), attention_mask=torch.ones((1, len(before)), dtype=torch.long),
            max_new_tokens=len(c.tokens), do_sample=False, eos_token_id=lm.template.end,
            prefix_allowed_tokens_fn=lambda _, ids, p=before, legal=legal_at: legal[len(ids) > len(p)],
        )  # fmt: skip
        assert tuple(out[0, len(before) :].tolist()) == c.tokens


def test_late_heads_leave_the_context_alone(build: Build, ask: Ask) -> None:
    """The keys and values of a context are the bare trunk's, whatever head asked for them."""
    lm = build()
    requests = ask(lm, 10)
    lm.generate(requests)
    held = {c: [(k.clone(), v.clone()) for k, v in kv] for c, kv in lm._store.items()}
    lm.forget()
    bare = toy_model()
    bare.heads.add("unused")
    bare.read(list(held))
    for c, kv in held.items():
        for (k, v), (k2, v2) in zip(kv, bare._store[c], strict=True):
            assert torch.allclose(k, k2, atol=1e-5) and torch.allclose(v, v2, atol=1e-5)


def test_using_cached_contexts_never_changes_them(build: Build, ask: Ask) -> None:
    lm = build()
    requests = ask(lm, 10)
    first = lm.generate(requests)
    sums = [float(k.sum()) for kv in lm._store.values() for k, _ in kv]
    assert [c.tokens for c in lm.generate(requests)] == [c.tokens for c in first]
    assert [float(k.sum()) for kv in lm._store.values() for k, _ in kv] == sums


def test_a_small_cache_gives_the_same_and_stays_small(build: Build, ask: Ask) -> None:
    large = build()
    requests = ask(large, 40)
    expected = [c.tokens for c in large.generate(requests)]
    small = build(max_batch=4)
    small.cache_bytes = 40_000
    assert [c.tokens for c in small.generate(requests)] == expected
    assert small._stored <= 200_000 < sum(k.nbytes + v.nbytes for kv in large._store.values() for k, v in kv)
    assert small._stored == sum(k.nbytes + v.nbytes for kv in small._store.values() for k, v in kv)


def test_no_illegal_token_is_ever_sampled(build: Build, ask: Ask) -> None:
    lm = build()
    for c in lm.generate(ask(lm, 80, agents=TEXT, temperature=3.0)):
        for t, (token, mask) in enumerate(zip(c.tokens, c.masks, strict=True)):
            assert bool(lm.legal(mask, t == 0)[token])
            assert (token not in lm.tokenizer.all_special_ids) or token in mask[1] or token == lm.template.end
        assert c.cut == (c.tokens[-1] != lm.template.end)
        assert "<|" not in c.text or not set(c.tokens) & set(lm.tokenizer.all_special_ids) - {lm.template.end}


def test_an_output_stops_at_its_length_limit_and_is_marked(build: Build, ask: Ask) -> None:
    lm = build()
    done = lm.generate(ask(lm, 40, agents=("answerer",)))
    cut = [c for c in done if c.cut]
    assert cut and all(len(c.tokens) == 9 for c in cut)


def test_greedy_ignores_seed_and_sampling_depends_on_nothing_else(build: Build, ask: Ask) -> None:
    lm = build()
    greedy, sampled = ask(lm, 20, agents=TEXT, sample=False), ask(lm, 20, agents=TEXT)
    other = [replace(r, seed=99) for r in greedy]
    assert [c.tokens for c in lm.generate(greedy)] == [c.tokens for c in lm.generate(other)]
    assert [c.tokens for c in lm.generate(sampled)] != [
        c.tokens for c in lm.generate([replace(r, seed=99) for r in sampled])
    ]
    assert uniforms(sampled[0], 3).tolist() == uniforms(sampled[0], 9).tolist()[:3]


def test_text_is_sampled_in_proportion_to_its_probability(build: Build, ask: Ask) -> None:
    """400 draws of one request's first token against its log-prob: standard error at most .025."""
    lm = build()
    request = replace(ask(lm, 1, agents=("filter",))[0], temperature=2.0)
    done = lm.generate([replace(request, key=(i,)) for i in range(400)])
    tokens = [c.tokens[0] for c in done]
    for token in set(tokens):
        p = np.exp(next(c.logprobs[0] for c in done if c.tokens[0] == token))
        assert abs(tokens.count(token) / 400 - p) < 0.09


def test_an_untrained_retriever_is_the_index(build: Build, ask: Ask) -> None:
    lm = build()
    lm.heads.set_state("retriever", {k: v * 0 for k, v in lm.heads.state("retriever").items()})
    for r in ask(lm, 12, agents=("retriever",), sample=False):
        assert r.candidates is not None
        (c,) = lm.generate([r])
        assert list(c.tokens) == [i for i, ok in enumerate(r.candidates.legal) if ok][: r.picks]


def test_held_candidates_are_never_picked(build: Build, ask: Ask) -> None:
    lm = build()
    requests = ask(lm, 60, agents=("retriever",), temperature=5.0)
    for r, c in zip(requests, lm.generate(requests), strict=True):
        assert r.candidates is not None
        assert all(r.candidates.legal[i] for i in c.tokens)
        assert len(set(c.tokens)) == len(c.tokens) == min(3, sum(r.candidates.legal))


def test_sampled_rankings_have_plackett_luce_frequencies(build: Build, ask: Ask) -> None:
    lm = build()
    request = ask(lm, 1, agents=("retriever",))[0]
    scores = np.log(np.array([4.0, 2.0, 1.0], np.float32))  # at temperature 1 the weights 4, 2, 1
    lm.heads.set_state("retriever", {k: v * 0 for k, v in lm.heads.state("retriever").items()})
    candidates = Candidates(("a", "b", "c"), scores, np.zeros((3, 6), np.float32), (True,) * 3)
    request = replace(request, candidates=candidates, temperature=1.0, picks=2)
    done = lm.generate([replace(request, key=(i,)) for i in range(1000)])
    assert abs(np.mean([c.tokens[0] == 0 for c in done]) - 4 / 7) < 0.05
    assert abs(np.mean([c.tokens == (0, 1) for c in done]) - 8 / 21) < 0.05


def test_other_orderings_are_drawn_like_the_one_that_acts_and_greedy_draws_none(build: Build, ask: Ask) -> None:
    lm = build()
    request = replace(ask(lm, 1, agents=("retriever",))[0], temperature=1.0, picks=1)
    scores = np.log(np.array([4.0, 2.0, 1.0], np.float32))
    lm.heads.set_state("retriever", {k: v * 0 for k, v in lm.heads.state("retriever").items()})
    candidates = Candidates(("a", "b", "c"), scores, np.zeros((3, 6), np.float32), (True,) * 3)
    requests = [replace(request, candidates=candidates, key=(i,)) for i in range(200)]
    done = lm.generate(requests)
    others = [o for c in done for o in c.others]
    assert len(others) == 200 * OTHERS
    assert abs(np.mean([o == (0,) for o in others]) - 4 / 7) < 0.05
    longer = Candidates(
        ("a", "b", "c", "d"), np.append(scores, np.float32(0)), np.zeros((4, 6), np.float32), (True,) * 4
    )
    beside = lm.generate([requests[0], replace(request, candidates=longer, key=(999,))])[0]
    assert (beside.tokens, beside.others) == (done[0].tokens, done[0].others)  # whatever runs beside it
    assert lm.generate([replace(requests[0], sample=False)])[0].others == ()


def test_gradients_reach_the_acting_head_alone(build: Build, ask: Ask) -> None:
    for activation in ("late", "everywhere"):
        lm = build(activation=activation)
        for agent in ("answerer", "filter", "retriever"):
            requests = ask(lm, 9, agents=(agent,))
            for chunk in lm.chunks(list(zip(requests, lm.generate(requests), strict=True))):
                lm.evaluate(chunk)[0].sum().backward()
            for name in lm.heads.names:
                got = [p.grad is not None and bool(p.grad.any()) for p in lm.heads.named(name).values()]
                assert any(got) == (name == agent)
                for p in lm.heads.named(name).values():
                    p.grad = None
            assert all(p.grad is None for n, p in lm.trunk.named_parameters() if "lora_" not in n)


def test_chunks_hold_one_head_and_kind_and_can_be_read_by_another_head(build: Build, ask: Ask) -> None:
    lm = build()
    requests = ask(lm, 40)
    done = lm.generate(requests)
    chunks = lm.chunks(list(zip(requests, done, strict=True)), size=3)
    assert sorted(r for c in chunks for r in c.rows) == list(range(40))
    for c in chunks:
        assert len(c.rows) <= 3
        assert {requests[r].head for r in c.rows} == {c.head}
        assert len({requests[r].candidates is None for r in c.rows}) == 1
    lm.heads.copy("answerer", "answerer@warm")
    mine = [i for i, r in enumerate(requests) if r.role == "answerer"]
    acts = [(requests[i], done[i]) for i in mine]
    warm = lm.chunks(acts, head="answerer@warm")
    assert {c.head for c in warm} == {"answerer@warm"}
    bare = [lm.evaluate(c)[0] for c in lm.chunks(acts, head=None)]
    same = [lm.evaluate(c)[0] for c in warm]
    own = [lm.evaluate(c)[0] for c in lm.chunks(acts)]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(same, own, strict=True))
    assert not torch.allclose(bare[0], own[0], atol=1e-2)


def test_one_head_may_serve_text_and_ranking_at_once(build: Build, ask: Ask) -> None:
    lm = build()
    requests = [replace(r, head="retriever") for r in ask(lm, 30)]
    done = lm.generate(requests)
    for c, logp in zip(done, recomputed(lm, requests, done), strict=True):
        assert np.allclose(c.logprobs, logp, atol=1e-4)


def test_encode_reads_the_last_token_of_each_row(build: Build, ask: Ask) -> None:
    lm = build()
    requests = [replace(r, head="answerer") for r in ask(lm, 8, agents=TEXT)]
    acts = [(r, Completion((), (), ())) for r in requests]
    for chunk in lm.chunks(acts, size=8):
        out = lm.encode(chunk)
        for b, row in enumerate(chunk.rows):
            (alone,) = lm.chunks([acts[row]])
            assert torch.allclose(out[b], lm.encode(alone)[0], atol=1e-4)


def test_twenty_passages_can_be_shown_and_selected(build: Build, ask: Ask) -> None:
    lm = build()
    (request,) = ask(lm, 1, agents=("answerer",))
    long = replace(request, context=tuple(request.context) * 20, grammar=FreeText(4).grammar(lm.template))
    done = lm.generate([long, request])
    assert np.allclose(done[0].logprobs, recomputed(lm, [long, request], done)[0], atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("chat", [True, False])
def test_a_hub_checkpoint_loads_from_its_folder(arch: str, chat: bool, tmp_path: Path) -> None:
    trunk, tokenizer, path = load_trunk(str(save_toy(tmp_path / "hub", arch, chat)))
    assert path == str((tmp_path / "hub").resolve())
    assert trunk.config.model_type == arch
    assert bool(tokenizer.chat_template) == chat
    assert torch.equal(trunk.get_input_embeddings().weight, toy_trunk(tokenizer, 0, arch).get_input_embeddings().weight)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llm\.model"):
        load_trunk(str(tmp_path))


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "gemma2": {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 8.0},
    "cohere": {},
    "phi": {},
    "gpt_neox": {},
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_any_causal_model_is_read_as_it_reads_itself(arch: str) -> None:
    """Its own logits are the body's hidden states under its output matrix, whatever it scales, caps or leaves out."""
    tokenizer = toy_tokenizer(markers=False)
    config = AutoConfig.for_model(
        arch, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, bos_token_id=0,
        eos_token_id=2, **ARCHITECTURES[arch],
    )  # fmt: skip
    trunk = AutoModelForCausalLM.from_config(config).eval()
    lm = LanguageModel(trunk, tokenizer, Heads(trunk, 4, 8, "toy", "late"))
    context = tuple(range(40, 80))
    request = Request((0,), "answerer", "answerer", context, (81, 82), FreeText(4).grammar(lm.template))
    lm.heads.add("answerer")  # changes nothing yet
    (done,) = lm.generate([request])
    with torch.no_grad():
        logits = trunk(torch.tensor([[*context, 81, 82]])).logits[0, -1].float()
    legal = lm.legal(done.masks[0], True)
    own = torch.log_softmax(logits.masked_fill(~legal, float("-inf")), -1)
    assert abs(float(own.max()) - done.logprobs[0]) < 1e-4


def test_a_model_that_cannot_carry_heads_is_refused() -> None:
    config = AutoConfig.for_model("mamba", vocab_size=40, hidden_size=32, num_hidden_layers=1, state_size=4)
    trunk = AutoModelForCausalLM.from_config(config)
    with pytest.raises(HeadError, match=r"llm\.model"):
        Heads(trunk, 4, 8, "toy", "late").add("answerer")


def test_toy_models_are_reproducible() -> None:
    a, b, c = (toy_model(seed=s).heads.trunk_hash for s in (0, 0, 1))
    assert a == b != c

"""LanguageModel in process: any AutoModelForCausalLM, its heads, batched masked decoding, and the differentiable pass.

Late activation: the bare trunk reads a context once under no_grad; its keys and values serve decoding, critic, KL
reference and every PPO epoch. Only role suffix and action run through a head. Contexts are right-padded when read,
left-padded when used; position ids are always explicit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from jointrag.data.errors import ConfigError
from jointrag.llm import ranking
from jointrag.llm.heads import Heads
from jointrag.llm.template import Template
from jointrag.llm.types import Completion, Mask, Request

TINY = Path(__file__).resolve().parent / "tiny"
OTHERS = 16  # orderings drawn beside the one that acts
NEAR_TIE = 1e-3  # logits closer than this may change places with the batch's shape


def uniforms(request: Request, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return `count` uniform numbers in (0, 1) that belong to the request, whatever the call order."""
    key = hashlib.blake2b(repr((request.seed, request.key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big"))).random(count)


@dataclass
class Chunk:
    """Decisions of one head, padded: B rows, C context, S suffix + action, T action tokens."""

    rows: list[int]  # positions in the list given
    head: str | None
    kv: list[tuple[torch.Tensor, torch.Tensor]] | None  # per layer [B, H, C, D], None = context not cached
    context_len_B: torch.Tensor
    tokens_BS: torch.Tensor
    real_BS: torch.Tensor  # True = a token, False = padding
    at_BT: torch.Tensor  # index in S whose output predicts action token t
    picked_BT: torch.Tensor
    used_BT: torch.Tensor
    legal_BTV: torch.Tensor | None  # None for rankings
    temperature_B: torch.Tensor
    candidates: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # scores, vectors, legal


class LanguageModel:
    """The one seam: generate, evaluate, encode. `heads` act on the frozen `trunk`."""

    def __init__(
        self,
        trunk: Any,
        tokenizer: Any,
        heads: Heads,
        max_context: int = 512,
        max_batch: int = 128,
        cache_mb: int = 2048,
    ) -> None:
        self.trunk, self.tokenizer, self.heads = trunk, tokenizer, heads
        self.template = Template.of(tokenizer)
        self.max_context, self.max_batch, self.cache_bytes = max_context, max_batch, cache_mb * 2**20
        self.late = heads.activation == "late"
        self.device = next(trunk.parameters()).device
        self.vocab = int(trunk.get_output_embeddings().weight.shape[0])
        special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
        self.text_V = torch.ones(self.vocab, dtype=torch.bool, device=self.device)
        self.text_V[[i for i in special if i < self.vocab]] = False
        self.text_V[len(tokenizer) :] = False
        self.text_V[self.template.end] = True
        self._masks: dict[Mask, torch.Tensor] = {}
        self._store: OrderedDict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = OrderedDict()
        self._stored = 0
        self.forward_tokens = 0  # tokens read by the trunk, padding left out

    # contexts

    def forget(self) -> None:
        """Drop all cached contexts."""
        self._store.clear()
        self._stored = 0

    def legal(self, mask: Mask, first: bool) -> torch.Tensor:
        """Return the bool vector [V] of legal tokens; text never starts with the end token."""
        key = (mask[0], (*mask[1], -1) if first else mask[1])
        if key not in self._masks:
            row = self.text_V.clone() if mask[0] else torch.zeros_like(self.text_V)
            if first and mask[0]:
                row[self.template.end] = False
            row[list(mask[1])] = True
            self._masks[key] = row
        return self._masks[key]

    def _body(self, ids: torch.Tensor, **kwargs: Any) -> Any:
        return self.trunk.get_decoder()(input_ids=ids, **kwargs)

    def _lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        config = self.trunk.config
        logits: torch.Tensor = self.trunk.get_output_embeddings()(hidden).float()
        logits = (
            logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        )  # Cohere, Granite
        cap = getattr(config, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    @torch.no_grad()
    def read(self, contexts: Sequence[tuple[int, ...]]) -> None:
        """Read contexts with the bare trunk and keep their keys and values."""
        fresh = sorted({c for c in contexts if c not in self._store}, key=lambda c: (len(c), c))
        for c in contexts:
            if c in self._store:
                self._store.move_to_end(c)
        self.heads.use(None)
        for part in self._near(fresh):
            size = len(part[-1])
            ids = torch.zeros((len(part), size), dtype=torch.long)
            for b, c in enumerate(part):
                ids[b, : len(c)] = torch.tensor(c)
            cache: Any = DynamicCache()
            self._body(ids.to(self.device), past_key_values=cache, use_cache=True)  # right-padded: causal needs no mask
            self.forward_tokens += sum(map(len, part))
            for b, c in enumerate(part):
                kv = [(x.keys[b, :, : len(c)].clone(), x.values[b, :, : len(c)].clone()) for x in cache.layers]
                self._store[c] = kv
                self._stored += sum(k.nbytes + v.nbytes for k, v in kv)
        needed = set(contexts)
        while self._stored > self.cache_bytes and len(self._store) > len(needed):
            oldest, kv = next(iter(self._store.items()))
            if oldest in needed:
                self._store.move_to_end(oldest)
                continue
            del self._store[oldest]
            self._stored -= sum(k.nbytes + v.nbytes for k, v in kv)

    def _near(self, contexts: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
        """Yield contexts, given by length, in parts of near length: padding costs what tokens cost."""
        start = 0
        for end in range(1, len(contexts) + 1):
            full = end - start == self.max_batch
            if end == len(contexts) or full or len(contexts[end]) > 1.2 * len(contexts[start]) + 2:
                yield contexts[start:end]
                start = end

    def _gather(self, contexts: Sequence[tuple[int, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return left-padded keys and values of contexts, per layer [B, H, C, D]."""
        self.read(contexts)
        size = max(map(len, contexts))
        rows = [self._store[c] for c in contexts]
        out = []
        for layer in range(len(rows[0])):
            pair = []
            for part in (0, 1):
                first = rows[0][layer][part]
                full = first.new_zeros((len(rows), first.shape[0], size, first.shape[2]))
                for b, row in enumerate(rows):
                    full[b, :, size - row[layer][part].shape[1] :] = row[layer][part]
                pair.append(full)
            out.append((pair[0], pair[1]))
        return out

    def _suffix_pass(
        self,
        head: str | None,
        kv: list[tuple[torch.Tensor, torch.Tensor]] | None,
        context_len_B: torch.Tensor,
        tokens_BS: torch.Tensor,
        real_BS: torch.Tensor,
    ) -> tuple[torch.Tensor, DynamicCache]:
        """Run tokens through a head on top of cached contexts; return hidden states [B, S, H] and the cache."""
        self.heads.use(head)
        cache = DynamicCache()
        past = 0
        if kv is not None:
            past = kv[0][0].shape[2]
            for i, (k, v) in enumerate(kv):
                cache.update(k, v, i)
        slots = torch.arange(past, device=self.device)[None]
        seen = torch.cat([slots >= past - context_len_B[:, None], real_BS], 1)
        base = context_len_B[:, None] if kv is not None else 0
        positions = base + (real_BS.long().cumsum(1) - 1).clamp(min=0)
        out = self._body(
            tokens_BS, attention_mask=seen.long(), position_ids=positions, past_key_values=cache, use_cache=True
        )
        self.forward_tokens += int(real_BS.sum())
        return out.last_hidden_state, cache

    # acting

    def groups(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield positions of requests that run together: one head and kind, near lengths, in an order of their own."""
        order = sorted(
            range(len(requests)),
            key=lambda i: (
                requests[i].head or "", requests[i].candidates is not None, len(requests[i].suffix),
                len(requests[i].context), requests[i].key,
            ),
        )  # fmt: skip
        start = 0
        while start < len(order):
            a = requests[order[start]]
            end = start
            while (
                end < len(order)
                and end - start < self.max_batch
                and requests[order[end]].head == a.head
                and (requests[order[end]].candidates is None) == (a.candidates is None)
                and len(requests[order[end]].suffix) == len(a.suffix)
            ):
                end += 1
            yield order[start:end]
            start = end

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Act on requests, batched; completions are parallel to them."""
        out: dict[int, Completion] = {}
        for rows in self.groups(requests):
            group = [requests[i] for i in rows]
            done = self._rank(group) if group[0].candidates is not None else self._decode(group)
            out.update(zip(rows, done, strict=True))
        return [out[i] for i in range(len(requests))]

    def _start(self, group: Sequence[Request]) -> tuple[torch.Tensor, DynamicCache, torch.Tensor, torch.Tensor]:
        """Run contexts and suffixes; return last hidden state [B, H], cache, positions [B], seen slots [B, *]."""
        suffix = torch.tensor([r.suffix for r in group], device=self.device)
        lengths = torch.tensor([len(r.context) for r in group], device=self.device)
        if self.late:
            kv = self._gather([r.context for r in group])
            size = kv[0][0].shape[2]
            hidden, cache = self._suffix_pass(
                group[0].head, kv, lengths, suffix, torch.ones_like(suffix, dtype=torch.bool)
            )
            seen = torch.arange(size, device=self.device)[None] >= size - lengths[:, None]
            seen = torch.cat([seen, torch.ones_like(suffix, dtype=torch.bool)], 1)
        else:
            size = int(lengths.max())
            ids = torch.zeros((len(group), size), dtype=torch.long)
            for b, r in enumerate(group):
                ids[b, size - len(r.context) :] = torch.tensor(r.context)
            real = torch.arange(size, device=self.device)[None] >= size - lengths[:, None]
            real = torch.cat([real, torch.ones_like(suffix, dtype=torch.bool)], 1)
            none = torch.zeros(len(group), dtype=torch.long, device=self.device)
            hidden, cache = self._suffix_pass(
                group[0].head, None, none, torch.cat([ids.to(self.device), suffix], 1), real
            )
            seen = real
        return hidden[:, -1], cache, lengths + suffix.shape[1], seen

    def _decode(self, group: Sequence[Request]) -> list[Completion]:
        hidden, cache, position, seen = self._start(group)
        longest = max(r.grammar.max_tokens for r in group)
        noise = [uniforms(r, longest) if r.sample else None for r in group]
        temperature = torch.tensor([r.temperature for r in group], device=self.device)
        tokens: list[list[int]] = [[] for _ in group]
        logps: list[list[float]] = [[] for _ in group]
        masks: list[list[Mask]] = [[] for _ in group]
        ties = [0] * len(group)
        rows = list(range(len(group)))  # of the group, that a step runs: those that have not ended, and some that have
        live = [True] * len(group)
        for t in range(longest):
            step = [group[b].grammar.mask(tuple(tokens[b])) if live[b] else (False, (self.template.end,)) for b in rows]
            legal = torch.stack([self.legal(m, t == 0) for m in step])
            logits = (self._lm_head(hidden) / temperature[rows, None]).masked_fill(~legal, float("-inf"))
            logp = torch.log_softmax(logits, -1)
            choice = logits.argmax(-1)
            sampled = [i for i, b in enumerate(rows) if noise[b] is not None and live[b]]
            if sampled:
                u = torch.tensor([float(noise[rows[i]][t]) for i in sampled], dtype=torch.float64, device=self.device)  # type: ignore[index]
                total = logp[sampled].double().exp().cumsum(-1)
                drawn = torch.searchsorted(total, (u * total[:, -1])[:, None], right=True)[:, 0]
                choice[sampled] = drawn.clamp(max=self.vocab - 1)
            top = logits.topk(2, -1).values
            close = ((top[:, 0] - top[:, 1]) < NEAR_TIE).tolist()
            picked, picked_logp = choice.tolist(), logp.gather(1, choice[:, None])[:, 0].tolist()
            for i, b in enumerate(rows):
                if live[b]:
                    tokens[b].append(picked[i])
                    logps[b].append(picked_logp[i])
                    masks[b].append(step[i])
                    ties[b] += close[i] and noise[b] is None
                    live[b] = picked[i] != self.template.end and len(tokens[b]) < group[b].grammar.max_tokens
            going = [i for i, b in enumerate(rows) if live[b]]
            if not going:
                break
            if len(going) <= len(rows) // 2:  # the rest has ended: run it no further
                cache.batch_select_indices(torch.tensor(going, device=self.device))
                rows, choice = [rows[i] for i in going], choice[going]
                seen, position = seen[going], position[going]
            seen = torch.cat([seen, torch.ones((len(rows), 1), dtype=torch.bool, device=self.device)], 1)
            self.heads.use(group[0].head)
            body = self._body(
                choice[:, None],
                attention_mask=seen.long(),
                position_ids=position[:, None],
                past_key_values=cache,
                use_cache=True,
            )
            self.forward_tokens += len(going)
            hidden = body.last_hidden_state[:, -1]
            position = position + 1
        return [
            Completion(
                tuple(tokens[b]), tuple(logps[b]), tuple(masks[b]), self.template.decode(tokens[b]),
                tokens[b][-1] != self.template.end, ties[b],
            )
            for b in range(len(group))
        ]  # fmt: skip

    def _candidates(self, group: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores [B, N], vectors [B, N, D], legal [B, N], padded with illegal candidates."""
        cands = [r.candidates for r in group]
        n = max(len(c.ids) for c in cands if c)
        d = next(c.vectors.shape[1] for c in cands if c)
        scores, vectors = np.zeros((len(group), n), np.float32), np.zeros((len(group), n, d), np.float32)
        legal = np.zeros((len(group), n), bool)
        for b, c in enumerate(cands):
            assert c is not None
            m = len(c.ids)
            scores[b, :m], vectors[b, :m], legal[b, :m] = c.scores, c.vectors, c.legal
        return tuple(torch.from_numpy(x).to(self.device) for x in (scores, vectors, legal))  # type: ignore[return-value]

    def _taus(self, group: Sequence[Request]) -> torch.Tensor:
        return torch.tensor([r.temperature for r in group], device=self.device)

    def _rank(self, group: Sequence[Request]) -> list[Completion]:
        hidden, _, _, _ = self._start(group)
        scores, vectors, legal = self._candidates(group)
        logits = self._candidate_logits(group[0].head, hidden, (scores, vectors, legal), self._taus(group))
        n = logits.shape[1]
        noise = np.zeros((1 + OTHERS, len(group), n))
        for b, r in enumerate(group):
            if r.sample and r.candidates is not None:
                m = len(r.candidates.ids)
                drawn = np.clip(uniforms(r, (1 + OTHERS) * m).reshape(-1, m), 1e-12, 1 - 1e-12)
                noise[:, b, :m] = -np.log(-np.log(drawn))
        picks = [min(r.picks, int(legal[b].sum())) for b, r in enumerate(group)]
        orders = [ranking.order(logits.double(), max(picks), torch.from_numpy(z).to(self.device)) for z in noise]
        chosen, others = orders[0], [o.tolist() for o in orders[1:]]
        used = torch.arange(max(picks), device=self.device)[None] < torch.tensor(picks, device=self.device)[:, None]
        logp, _ = ranking.log_prob(logits, chosen, used)
        return [
            Completion(
                tuple(chosen[b, :k].tolist()), tuple(logp[b, :k].tolist()), (),
                others=tuple(tuple(o[b][:k]) for o in others) if group[b].sample else (),
            )
            for b, k in enumerate(picks)
        ]  # fmt: skip

    def _candidate_logits(
        self,
        head: str | None,
        encoding: torch.Tensor,
        cands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tau: torch.Tensor,
    ) -> torch.Tensor:
        scores, vectors, legal = cands
        extra: torch.Tensor | None = self.heads.extra.get(head or "", {}).get("projection")
        if extra is None:
            extra = torch.zeros((vectors.shape[2], encoding.shape[1]), device=self.device)
        return ranking.logits(encoding, extra, scores, vectors, tau, legal)

    # differentiating

    def chunks(self, acts: Sequence[tuple[Request, Completion]], head: str | None = "", size: int = 0) -> list[Chunk]:
        """Pack decisions into chunks of one head and kind, sorted by the tokens a pass runs, then by cached context.

        A chunk ends at `size` rows, or where its shortest row would be padded to more than twice its length (and 4).
        `head` replaces the requests' own.
        """
        requests = [r for r, _ in acts]
        size = size or self.max_batch
        order = sorted(
            range(len(acts)),
            key=lambda i: (
                requests[i].head or "", requests[i].candidates is not None, len(self._run_tokens(*acts[i])),
                len(requests[i].context), i,
            ),
        )  # fmt: skip
        out, start = [], 0
        while start < len(order):
            a, end = requests[order[start]], start
            longest = 2 * len(self._run_tokens(*acts[order[start]])) + 4
            while (
                end < len(order)
                and end - start < size
                and len(self._run_tokens(*acts[order[end]])) <= longest
                and requests[order[end]].head == a.head
                and (requests[order[end]].candidates is None) == (a.candidates is None)
            ):
                end += 1
            out.append(self._chunk(acts, order[start:end], a.head if head == "" else head))
            start = end
        return out

    def _run_tokens(self, request: Request, completion: Completion) -> tuple[int, ...]:
        """Return what a pass runs through the head: suffix and action but its last token, the context unless cached."""
        written = () if request.candidates is not None else completion.tokens[:-1]
        return (() if self.late else request.context) + request.suffix + tuple(written)

    def _chunk(self, acts: Sequence[tuple[Request, Completion]], rows: list[int], head: str | None) -> Chunk:
        group = [acts[i] for i in rows]
        is_ranking = group[0][0].candidates is not None
        steps = max(len(c.tokens) for _, c in group)
        lengths = torch.tensor([len(r.context) for r, _ in group], device=self.device)
        sequences = [self._run_tokens(r, c) for r, c in group]
        size = max(map(len, sequences))
        tokens = torch.zeros((len(rows), size), dtype=torch.long)
        real = torch.zeros((len(rows), size), dtype=torch.bool)
        at, picked = (
            torch.zeros((len(rows), steps), dtype=torch.long),
            torch.zeros((len(rows), steps), dtype=torch.long),
        )
        used = torch.zeros((len(rows), steps), dtype=torch.bool)
        legal = None if is_ranking else torch.zeros((len(rows), steps, self.vocab), dtype=torch.bool)
        for b, (_, c) in enumerate(group):
            n, m = len(sequences[b]), len(c.tokens)
            tokens[b, :n], real[b, :n] = torch.tensor(sequences[b]), True
            first = n - (1 if is_ranking else m)
            at[b, :m] = first if is_ranking else torch.arange(first, first + m)
            picked[b, :m], used[b, :m] = torch.tensor(c.tokens), True
            if legal is not None:
                for t, mask in enumerate(c.masks):
                    legal[b, t] = self.legal(mask, t == 0).cpu()
        return Chunk(
            rows=rows,
            head=head,
            kv=self._gather([r.context for r, _ in group]) if self.late else None,
            context_len_B=lengths if self.late else torch.zeros_like(lengths),
            tokens_BS=tokens.to(self.device),
            real_BS=real.to(self.device),
            at_BT=at.to(self.device),
            picked_BT=picked.to(self.device),
            used_BT=used.to(self.device),
            legal_BTV=None if legal is None else legal.to(self.device),
            temperature_B=self._taus([r for r, _ in group]),
            candidates=self._candidates([r for r, _ in group]) if is_ranking else None,
        )

    def evaluate(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies [B, T] of the actions taken, under the stored masks; 0 where unused."""
        hidden, _ = self._suffix_pass(chunk.head, chunk.kv, chunk.context_len_B, chunk.tokens_BS, chunk.real_BS)
        if chunk.candidates is not None:
            encoding = hidden.gather(1, chunk.at_BT[:, :1, None].expand(-1, -1, hidden.shape[-1]))[:, 0]
            logits = self._candidate_logits(chunk.head, encoding, chunk.candidates, chunk.temperature_B)
            return ranking.log_prob(logits, chunk.picked_BT, chunk.used_BT)
        assert chunk.legal_BTV is not None
        at = chunk.used_BT
        picked_rows = torch.arange(len(chunk.rows), device=self.device)[:, None].expand_as(at)[at]
        states_NH = hidden[picked_rows, chunk.at_BT[at]]
        logits_NV = self._lm_head(states_NH) / chunk.temperature_B[picked_rows][:, None]
        logp_NV = torch.log_softmax(logits_NV.masked_fill(~chunk.legal_BTV[at], float("-inf")), -1)
        picked_N = logp_NV.gather(1, chunk.picked_BT[at][:, None])[:, 0]
        entropy_N = -(logp_NV.exp() * logp_NV.masked_fill(~chunk.legal_BTV[at], 0.0)).sum(-1)
        zero = torch.zeros(at.shape, device=self.device)
        return zero.masked_scatter(at, picked_N), zero.masked_scatter(at, entropy_N)

    def encode(self, chunk: Chunk) -> torch.Tensor:
        """Return the hidden state [B, H] of each row's last token (a request with an empty completion)."""
        hidden, _ = self._suffix_pass(chunk.head, chunk.kv, chunk.context_len_B, chunk.tokens_BS, chunk.real_BS)
        last = chunk.real_BS.sum(1) - 1
        return hidden[torch.arange(len(chunk.rows), device=self.device), last]


def load_trunk(model: str, dtype: str = "auto", device: str = "auto") -> tuple[Any, Any, str]:
    """Return (trunk, tokenizer, path): `tiny` is the shipped one; anything else a folder or hub name."""
    path = str(TINY) if model == "tiny" else model
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        trunk: Any = AutoModelForCausalLM.from_pretrained(path, dtype=kinds[dtype])
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"llm.model: {model!r} cannot be loaded ({str(e).splitlines()[0]}); expected 'tiny', a folder with a model "
            f"and "
            f"tokenizer, or a hub name (offline: one that is cached)"
        ) from e
    if dtype == "auto" and device == "cpu":
        trunk = trunk.float()
    trunk.to(device).eval()
    return trunk, tokenizer, portable(path)


def portable(path: str) -> str:
    """Return a path relative to the working directory where it lies below it: heads travel with a clone."""
    p = Path(path)
    if p.exists():
        try:
            return str(p.resolve().relative_to(Path.cwd()))
        except ValueError:
            return str(p.resolve())
    return path


__all__ = ["Chunk", "LanguageModel", "load_trunk", "portable", "uniforms"]

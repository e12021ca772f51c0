"""A tiny real language model for tests, built in code: random Llama or Qwen2 (2 layers of 32), byte-level BPE.

It reads nothing and answers nonsense, yet it is no fake: the same trunk, tokenizer, heads and cache as any other model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from jointrag.data.errors import ConfigError
from jointrag.llm.heads import Heads
from jointrag.llm.model import LanguageModel
from jointrag.llm.template import MARKERS, marker_tokens

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
CHAT = (  # ChatML, as Qwen2 has it
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "Name the teacher of the author of Bonu Song . Which is the home of Bane Dofu ? unknown yes no",
    "the person who lives in this place and works there for years , first in 1901 and then in 1999 .",
    "Passages: Question: Searched: Task of the rewriter: Output: STOP NONE || 1 2 3 4 5 6 7 8 9 10 11 12",
)


@cache
def _engine(markers: bool) -> str:
    """Return the tokenizer as JSON: 256 bytes, the special tokens, and as many merges as a few sentences give."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    special = marker_tokens() if markers else list(CHAT_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator([f" {t}" for t in TEXTS] * 4, trainer)
    return str(engine.to_str())


def toy_tokenizer(markers: bool = True, chat_template: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE: with the role markers of the shipped trunk, or like a hub model's."""
    first, end, pad = (MARKERS.begin, MARKERS.end, "<|pad|>") if markers else (None, CHAT_TOKENS[2], CHAT_TOKENS[0])
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(_engine(markers)),
        bos_token=first,
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=[] if markers else list(CHAT_TOKENS),
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        tokenizer.chat_template = CHAT
    return tokenizer


def toy_trunk(tokenizer: Any, seed: int = 0, arch: str = "llama") -> Any:
    """Return a random trunk; its weights are ten times larger than usual, so that its choices are rarely near ties."""
    if arch not in ARCHITECTURES:
        raise ConfigError(f"arch: got {arch!r}; expected one of {', '.join(ARCHITECTURES)}")
    config_class, model_class = ARCHITECTURES[arch]
    config = config_class(
        vocab_size=len(tokenizer) + 3,  # rows that no token has, as in padded hub embeddings
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=arch == "llama",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).eval()


def toy_model(
    seed: int = 0,
    activation: str = "late",
    arch: str = "llama",
    markers: bool = True,
    *,
    chat_template: bool = False,
    max_context: int = 512,
    max_batch: int = 128,
    dtype: torch.dtype = torch.float32,
    path: str = "toy",
) -> LanguageModel:
    """Return a language model of about 30,000 parameters; the same arguments give the same bytes."""
    tokenizer = toy_tokenizer(markers, chat_template)
    trunk = toy_trunk(tokenizer, seed, arch).to(dtype)
    return LanguageModel(trunk, tokenizer, Heads(trunk, 4, 8, path, activation, seed), max_context, max_batch)


def save_toy(folder: str | Path, arch: str = "llama", chat_template: bool = True, seed: int = 0) -> Path:
    """Write a plain checkpoint as from a hub, without markers; returns its folder."""
    tokenizer = toy_tokenizer(markers=False, chat_template=chat_template)
    toy_trunk(tokenizer, seed, arch).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


__all__ = ["save_toy", "toy_model", "toy_tokenizer", "toy_trunk"]

"""What agents and language models hand each other (a leaf: no torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jointrag.data.types import Passage


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent sees of the state: a context without a role in it, then an instruction for the role."""

    question: str
    passages: tuple[Passage, ...] = ()
    trail: tuple[str, ...] = ()  # queries asked so far, in order
    notes: tuple[tuple[str, str], ...] = ()  # further state keys, named
    instruction: str = ""

    @classmethod
    def of(
        cls,
        state: Mapping[str, Any],
        instruction: str = "",
        passages: Sequence[Passage] | None = None,
        trail: Sequence[str] | None = None,
        notes: Sequence[str] = (),
    ) -> Observation:
        """Observe question, evidence and trail; `passages` and `trail` replace them, `notes` names more keys."""
        return cls(
            question=str(state["question"]),
            passages=tuple(state.get("evidence") or () if passages is None else passages),
            trail=tuple(state.get("queries") or () if trail is None else trail),
            notes=tuple((n, str(state.get(n) or "")) for n in notes),
            instruction=instruction,
        )


Mask = tuple[bool, tuple[int, ...]]  # (ordinary text and the end token are legal?, further legal token ids)


@dataclass(frozen=True)
class Candidates:
    """What a ranking action orders: N passages with their z-scored index scores and vectors."""

    ids: tuple[str, ...]
    scores: Any  # float32 [N], z-scored per query
    vectors: Any  # float32 [N, D], unit norm
    legal: tuple[bool, ...]  # False = held already


@dataclass(frozen=True)
class Request:
    """One question to the language model: everything needed to act, and to differentiate the action again."""

    key: tuple[Any, ...]  # (episode, step, path...): batch order, and with `seed` the randomness
    role: str
    head: str | None  # None = the bare trunk
    context: tuple[int, ...]
    suffix: tuple[int, ...]
    grammar: Any = None  # an `actions.Grammar` for text, None for a ranking
    candidates: Candidates | None = None
    picks: int = 0  # how many candidates a ranking places
    sample: bool = False
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """What the language model did: T tokens (or picked candidate rows), each with its mask and behaviour log-prob."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # under mask and temperature, parallel to tokens
    masks: tuple[Mask, ...]  # parallel to tokens; empty for a ranking
    text: str = ""
    cut: bool = False  # ended by the length limit, not by its end token
    near_ties: int = 0  # positions whose two best logits (greedy) differ by less than 1e-3
    others: tuple[tuple[int, ...], ...] = ()  # rankings: further orderings drawn alike, for a baseline

"""Action kinds and their grammars: which tokens are legal at each position, torch-free.

The mask is stored with the decision and applied again, identically, in the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jointrag.llm.template import MARKERS, Template
from jointrag.llm.types import Mask


class MalformedError(ValueError):
    """An output no action can be read from; the agent's default action is taken instead."""


class Grammar:
    """Says which tokens may follow a prefix, and when an action is complete."""

    max_tokens: int = 1

    def mask(self, prefix: tuple[int, ...]) -> Mask:
        """Return the mask of the next position."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextGrammar(Grammar):
    """Ordinary text that ends by itself; `first` tokens are legal at position 0 only and end at once."""

    end: int
    max_tokens: int
    first: tuple[int, ...] = ()
    between: tuple[int, ...] = ()  # legal after text, at most `repeats` times
    repeats: int = 0

    def mask(self, prefix: tuple[int, ...]) -> Mask:  # noqa: D102
        if not prefix:
            return True, self.first
        if prefix[0] in self.first:
            return False, (self.end,)
        used = sum(t in self.between for t in prefix)
        if prefix[-1] in self.between:
            return True, ()
        return True, self.between if used < self.repeats else ()


@dataclass(frozen=True)
class SelectGrammar(Grammar):
    """A subset of n items as ascending numbers, or an explicit none; one token sequence per subset."""

    end: int
    items: tuple[tuple[int, ...], ...]
    none: tuple[int, ...]
    most: int

    @property
    def max_tokens(self) -> int:  # type: ignore[override]  # noqa: D102
        return max(len(self.none), self.most * max((len(i) for i in self.items), default=0)) + 1

    def _read(self, prefix: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
        """Return (complete items read, tokens of the item being read)."""
        read: list[int] = []
        rest: tuple[int, ...] = ()
        for token in prefix:
            rest = (*rest, token)
            if rest in self.items and not any(
                len(i) > len(rest) and i[: len(rest)] == rest for i in self.items[(read[-1] + 1 if read else 0) :]
            ):
                read.append(self.items.index(rest))
                rest = ()
        return read, rest

    def mask(self, prefix: tuple[int, ...]) -> Mask:  # noqa: D102
        if prefix and prefix[: len(self.none)] == self.none[: len(prefix)]:
            return False, (self.none[len(prefix)],) if len(prefix) < len(self.none) else (self.end,)
        read, rest = self._read(prefix)
        after = read[-1] + 1 if read else 0
        legal: list[int] = []
        if rest:
            legal = [i[len(rest)] for i in self.items[after:] if i[: len(rest)] == rest and len(i) > len(rest)]
            if rest in self.items[after:]:
                legal.append(self.end)
        elif len(read) < self.most:
            legal = [i[0] for i in self.items[after:]]
        if read and not rest:
            legal.append(self.end)
        if not prefix:
            legal.append(self.none[0])
        return False, tuple(dict.fromkeys(legal))

    def write(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that select these item numbers, from 0."""
        chosen = [t for n in sorted(numbers)[: self.most] for t in self.items[n]]
        return (*(chosen or self.none), self.end)

    def read(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the selected item numbers, from 0."""
        body = tokens[: tokens.index(self.end)] if self.end in tokens else tokens
        if body == self.none:
            return ()
        read, rest = self._read(body)
        if rest in self.items:
            read.append(self.items.index(rest))
        elif rest or not body:
            raise MalformedError(f"selection tokens {tokens} name no item")
        return tuple(read)


@dataclass(frozen=True)
class FreeText:
    """Free text of at most `max_tokens` tokens."""

    max_tokens: int = 24
    kind: str = field(default="text", init=False)

    def grammar(self, template: Template) -> TextGrammar:
        """Return the grammar for one tokenizer."""
        return TextGrammar(template.end, self.max_tokens)

    def write(self, template: Template, value: str) -> tuple[int, ...]:
        """Return the tokens that say `value`."""
        return (*template.text(value), template.end)


@dataclass(frozen=True)
class Queries:
    """One to `max_queries` queries, or stop."""

    max_queries: int = 1
    max_tokens: int = 24
    kind: str = field(default="queries", init=False)

    def grammar(self, template: Template) -> TextGrammar:
        """Return the grammar for one tokenizer; where stop is no single token it is read from the text."""
        if template.layout is not MARKERS:
            return TextGrammar(template.end, self.max_tokens)
        stop, also = template.literal(MARKERS.stop), template.literal(MARKERS.also)
        return TextGrammar(template.end, self.max_tokens, stop, also, self.max_queries - 1)

    def write(self, template: Template, value: tuple[str, ...]) -> tuple[int, ...]:
        """Return the tokens that ask these queries, or stop."""
        lay = template.layout
        if not value:
            return (*template.literal(lay.stop), template.end)
        ids = [t for q in value for t in (*template.literal(lay.also), *template.text(q))]
        return (*ids[len(template.literal(lay.also)) :], template.end)

    def read(self, template: Template, tokens: tuple[int, ...]) -> tuple[str, ...]:
        """Return the queries, () for stop."""
        lay = template.layout
        if lay is MARKERS:
            if tokens[:1] == template.literal(lay.stop):
                return ()
            parts, part = [], []
            for t in tokens:
                if t in template.literal(lay.also):
                    parts.append(part)
                    part = []
                else:
                    part.append(t)
            texts = [template.decode(p) for p in [*parts, part]]
        else:
            text = template.decode(tokens)
            if text.startswith(lay.stop.strip()):
                return ()
            texts = [t.strip() for t in text.split(lay.also.strip())]
        queries = tuple(dict.fromkeys(t for t in texts if any(c.isalnum() for c in t)))
        if not queries:
            raise MalformedError(f"no query in {template.decode(tokens)!r}; expected text, or stop")
        return queries[: self.max_queries]


@dataclass(frozen=True)
class Select:
    """A subset of the passages shown, at most `most`, or an explicit none."""

    most: int
    kind: str = field(default="select", init=False)

    def grammar(self, template: Template, items: int) -> SelectGrammar:
        """Return the grammar for `items` numbered passages."""
        lay = template.layout
        numbers = tuple(template.literal(lay.item.format(i=i)) for i in range(1, items + 1))
        return SelectGrammar(template.end, numbers, template.literal(lay.none), min(self.most, items))


@dataclass(frozen=True)
class Ranking:
    """An ordering of `k` candidates sampled without replacement (Plackett-Luce)."""

    k: int
    tau: float = 0.15  # logits are divided by it, so that exploration happens near ties
    kind: str = field(default="ranking", init=False)

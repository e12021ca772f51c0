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

    def mask(self, prefix: tuple[int, ...]) -> Mask:
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
    def max_tokens(self) -> int:  # type: ignore[override]
        return max(len(self.none), self.most * max((len(i) for i in self.items), default=0)) + 1

    def _read(self, prefix: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
        """Return (items surely read, tokens after them): longest match, the rest may be or become an item."""
        read: list[int] = []
        rest: tuple[int, ...] = ()
        for token in prefix:
            longer = (*rest, token)
            if not self._next(read, longer) and self._is_item(read, rest):
                read.append(self.items.index(rest))
                longer = (token,)
            rest = longer
        return read, rest

    def _next(self, read: list[int], rest: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return what may stand after the items read and starts with `rest`; none only alone, items only ascending."""
        items = self.items[read[-1] + 1 if read else 0 :] if len(read) < self.most else ()
        return [x for x in (*items, *(() if read else (self.none,))) if x[: len(rest)] == rest]

    def _is_item(self, read: list[int], rest: tuple[int, ...]) -> bool:
        """True where `rest` is an item that may follow those read."""
        return rest != self.none and rest in self._next(read, rest)

    def mask(self, prefix: tuple[int, ...]) -> Mask:
        read, rest = self._read(prefix)
        legal = [x[len(rest)] for x in self._next(read, rest) if len(x) > len(rest)]
        if self._is_item(read, rest):
            legal += [x[0] for x in self._next([*read, self.items.index(rest)], ())]
        if self._is_item(read, rest) or prefix == self.none:
            legal.append(self.end)
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
        if not self._is_item(read, rest):
            raise MalformedError(f"selection tokens {tokens} name no passage; expected ascending numbers, or none")
        return (*read, self.items.index(rest))


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
            parts: list[list[int]] = []
            part: list[int] = []
            for t in tokens:
                if t in template.literal(lay.also):
                    parts.append(part)
                    part = []
                else:
                    part.append(t)
            texts = [template.decode(p) for p in [*parts, part]]
        else:
            text = template.decode(tokens)
            stop = lay.stop.strip()
            if text.startswith(stop) and not text[len(stop) : len(stop) + 1].isalnum():
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

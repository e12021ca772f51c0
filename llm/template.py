"""Templates: how an observation becomes tokens, the same in warm start, joint training and inference.

context = passages, question, notes, trail (no role in it: every role may share its keys and values)
suffix  = role marker and instruction (the head acts from here on)

A layout is nothing but literal strings. `MARKERS` is the tiny trunk's: each literal is one special token, and a
passage's number closes it: that token has read the passage, so a filter can find the number by what it stands after
(with the number before the passage a trunk of this size chose among four at random). `PLAIN` says the same in words for
any other model. Content is always encoded with special-token parsing off, so retrieved text can
never yield a marker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jointrag.data.errors import ConfigError
from jointrag.llm.types import Observation

MAX_ITEMS = 16  # passages an observation can number


@dataclass(frozen=True, slots=True)
class Layout:
    """The literal strings around the content of an observation and of an action."""

    begin: str
    passage: str  # before a passage; {i}: the number a filter selects by
    text: str  # between its title and its text
    close: str  # after a passage
    question: str
    note: str  # {name}: a state key an agent of the user's reads
    query: str
    role: str  # {role}
    instruction: str  # {instruction}: "" where the marker alone says it
    stop: str  # literals of actions from here on
    also: str  # between parallel queries
    none: str
    item: str  # {i}
    end: str  # "" = the tokenizer's end-of-sequence token


ROLES = ("rewriter", "retriever", "filter", "answerer", "critic")
MARKERS = Layout(
    begin="<|begin|>", passage="", text="<|text|>", close="<|{i}|>", question="<|question|>", note="<|note|> {name} :",
    query="<|query|>", role="<|{role}|>", instruction="", stop="<|stop|>", also="<|also|>", none="<|none|>",
    item="<|{i}|>", end="<|end|>",
)  # fmt: skip
PLAIN = Layout(
    begin="Passages:", passage="\n[{i}]", text=".", close="", question="\nQuestion:", note="\n{name}:",
    query="\nSearched:", role="\nTask of the {role}:", instruction=" {instruction}\nOutput:", stop=" STOP", also=" ||",
    none=" NONE", item=" {i}", end="",
)  # fmt: skip


def marker_tokens() -> list[str]:
    """Return every special token of the `MARKERS` layout, in vocabulary order."""
    numbered = [MARKERS.item.format(i=i) for i in range(1, MAX_ITEMS + 1)]
    roles = [MARKERS.role.format(role=r) for r in ROLES]
    singles = ["<|pad|>", MARKERS.begin, MARKERS.end, MARKERS.text, MARKERS.question, "<|note|>", MARKERS.query]
    return [*singles, MARKERS.stop, MARKERS.also, MARKERS.none, "<|role|>", *roles, *numbered]


@dataclass
class Template:
    """Turns observations into token ids for one tokenizer; `fingerprint` travels with every head trained on it."""

    tokenizer: Any
    layout: Layout
    before: str = ""  # chat text before the context, between context and suffix, and after the suffix
    between: str = ""
    after: str = ""
    _text: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    _literal: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> Template:
        """Choose the layout a tokenizer calls for: markers, else plain words, chat-wrapped if it can."""
        if tokenizer.convert_tokens_to_ids(MARKERS.role.format(role="rewriter")) not in (None, tokenizer.unk_token_id):
            return cls(tokenizer, MARKERS)
        if tokenizer.eos_token_id is None:
            raise ConfigError("llm.model: the tokenizer has no end-of-sequence token; expected one: set `eos_token`")
        if not getattr(tokenizer, "chat_template", None):
            first = tokenizer("a")["input_ids"][0]  # models whose tokenizer begins every text so were trained with it
            return cls(tokenizer, PLAIN, tokenizer.bos_token if first == tokenizer.bos_token_id else "")
        marks = ("\ue000", "\ue001")
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "".join(marks)}], tokenize=False, add_generation_prompt=True,
            date_string="26 Jul 2024", enable_thinking=False,  # a prompt with today's date in it would not fit tomorrow
        )  # fmt: skip
        if [chat.count(m) for m in marks] != [1, 1]:
            raise ConfigError("llm.model: the chat template does not say a user's message once; expected one that does")
        before, rest = chat.split(marks[0])
        between, after = rest.split(marks[1])
        return cls(tokenizer, PLAIN, before, between, after)

    def literal(self, text: str) -> tuple[int, ...]:
        """Return the ids of a template literal (special tokens parsed)."""
        if text not in self._literal:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
            self._literal[text] = tuple(ids)
        return self._literal[text]

    def text(self, text: str) -> tuple[int, ...]:
        """Return the ids of content, preceded by a space; special tokens in it are ordinary characters."""
        if text not in self._text:
            if len(self._text) > 500_000:
                self._text.clear()
            sound = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
            ids = self.tokenizer(" " + sound, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            self._text[text] = tuple(ids)
        return self._text[text]

    @property
    def end(self) -> int:
        """The token that ends every action."""
        return self.literal(self.layout.end)[0] if self.layout.end else int(self.tokenizer.eos_token_id)

    def context(self, obs: Observation, max_context: int) -> tuple[tuple[int, ...], int]:
        """Return (ids, passages dropped): whole passages go from the end, then the start of the trail and question."""
        lay = self.layout
        passages = [
            (
                *self.literal(lay.passage.format(i=i)),
                *self.text(p.title),
                *self.literal(lay.text),
                *self.text(p.text),
                *self.literal(lay.close.format(i=i)),
            )
            for i, p in enumerate(obs.passages, 1)
        ]
        tail = [*self.literal(lay.question), *self.text(obs.question)]
        for name, value in obs.notes:
            tail += [*self.literal(lay.note.format(name=name)), *self.text(value)]
        for query in obs.trail:
            tail += [*self.literal(lay.query), *self.text(query)]
        head = [*self.literal(self.before), *self.literal(lay.begin)]
        room = max_context - len(head) - len(tail)
        kept = 0
        for p in passages:
            if len(p) > room:
                break
            room -= len(p)
            kept += 1
        ids = [*head, *(t for p in passages[:kept] for t in p), *tail]
        overflow = len(ids) - max_context
        if overflow > 0:  # even without passages too long: the middle goes, the beginning and the trail's end stay
            ids = [*ids[: len(head)], *ids[len(head) + overflow :]]
        return tuple(ids), len(passages) - kept

    def suffix(self, role: str, instruction: str, state: Sequence[tuple[str, str]] = ()) -> tuple[int, ...]:
        """Return the ids from the role marker on.

        `state` is what the critic reads beyond the actor's context: (agent or "", what is told of it) in order.
        """
        lay = self.layout
        if lay is MARKERS and role not in ROLES:
            marker = (*self.literal("<|role|>"), *self.text(f"{role} : {instruction}"))
        else:
            said = lay.instruction.format(instruction=instruction) if lay.instruction else ""
            marker = (*self.literal(self.between + lay.role.format(role=role)), *(self.literal(said) if said else ()))
        told: list[int] = []
        for agent, text in state:
            named = lay is MARKERS and agent in ROLES  # one token where the name would be several
            told += [*(self.literal(lay.role.format(role=agent)) if named else self.text(agent) if agent else ())]
            told += [*(self.text(text) if text else ())]
        return (*marker, *told, *self.literal(self.after))

    def fingerprint(self, instructions: dict[str, str]) -> str:
        """Return the sha256 of everything that shapes an observation: layout, chat text, prompts, tokenizer."""
        probe = self.text("The quick brown fox , 1984 <|stop|> Zürich")
        what = [asdict(self.layout), self.before, self.between, self.after, sorted(instructions.items()), probe]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of content ids, without the end token and surrounding space."""
        kept = [i for i in ids if i != self.end]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True)).strip()

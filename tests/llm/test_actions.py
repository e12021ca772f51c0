from __future__ import annotations

from itertools import combinations

import pytest

from jointrag.llm.actions import FreeText, Grammar, MalformedError, Queries, Select, SelectGrammar, TextGrammar
from jointrag.llm.template import MARKERS, Template
from jointrag.llm.toy import toy_tokenizer

END, NONE = 9, (8,)


@pytest.fixture(scope="module")
def marked() -> Template:
    return Template.of(toy_tokenizer())


@pytest.fixture(scope="module")
def plain() -> Template:
    return Template.of(toy_tokenizer(markers=False))


def sequences(grammar: Grammar, end: int) -> list[tuple[int, ...]]:
    """Every token sequence the masks allow, to its end."""
    done, todo = [], [()]
    while todo:
        prefix: tuple[int, ...] = todo.pop()
        text, legal = grammar.mask(prefix)
        assert not text and legal, "a selection has listed tokens only, and never none at all"
        for token in legal:
            if token == end:
                done.append((*prefix, token))
            else:
                todo.append((*prefix, token))
                assert len(prefix) < grammar.max_tokens
    return done


def subsets(n: int, most: int) -> set[tuple[int, ...]]:
    return {c for k in range(most + 1) for c in combinations(range(n), k)}


ITEMS = {
    "one token each": tuple((i,) for i in range(1, 6)),
    "two tokens each": ((1, 1), (1, 2), (2, 1), (2, 2)),
    "one begins the other": ((1,), (2,), (1, 3), (1, 4), (2, 3)),
    "a shared first token": ((7, 1), (7, 2), (7, 1, 3)),
    "none begins like an item": ((8, 1), (8, 2)),
}


@pytest.mark.parametrize("items", ITEMS.values(), ids=ITEMS.keys())
@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_subset_within_the_budget_has_exactly_one_token_sequence(
    items: tuple[tuple[int, ...], ...], most: int
) -> None:
    most = min(most, len(items))
    grammar = SelectGrammar(END, items, (8, 8) if (8, 1) in items else NONE, most)
    found = sequences(grammar, END)
    assert len(found) == len(set(found))
    assert sorted(grammar.read(s) for s in found) == sorted(subsets(len(items), most))
    for s in found:
        assert grammar.write(grammar.read(s)) == s
        assert len(s) <= grammar.max_tokens


@pytest.mark.parametrize("n", [1, 9, 10, 12, 16, 20])
def test_passage_numbers_of_real_tokenizers_select_every_pair(n: int, marked: Template, plain: Template) -> None:
    """In words " 1" begins " 10"; the markers end at 16, so 17 to 20 are several tokens."""
    for template in (marked, plain):
        grammar = Select(2).grammar(template, n)
        assert {grammar.read(s) for s in sequences(grammar, template.end)} == subsets(n, min(2, n))


def test_none_is_legal_only_alone_and_first() -> None:
    grammar = SelectGrammar(END, ((1,), (2,)), NONE, 2)
    assert set(grammar.mask(())[1]) == {1, 2, 8}
    assert grammar.mask((8,)) == (False, (END,))
    assert set(grammar.mask((1,))[1]) == {2, END}
    assert grammar.mask((2,)) == (False, (END,))  # ascending: nothing follows the last one
    assert grammar.read((8, END)) == ()


def test_without_items_only_none_is_legal() -> None:
    grammar = SelectGrammar(END, (), NONE, 0)
    assert sequences(grammar, END) == [(8, END)]
    assert grammar.max_tokens == 2


def test_selection_is_written_ascending_and_cut_to_the_budget() -> None:
    grammar = SelectGrammar(END, ((1,), (2,), (3,)), NONE, 2)
    assert grammar.write([2, 0]) == (1, 3, END)
    assert grammar.write([2, 1, 0]) == (1, 2, END)


@pytest.mark.parametrize("tokens", [(), (END,), (5, END), (2, 1, END), (1, 1, END), (8, 1, END), (1, 8, END)])
def test_selection_that_no_mask_allows_is_malformed(tokens: tuple[int, ...]) -> None:
    with pytest.raises(MalformedError):
        SelectGrammar(END, ((1,), (2,)), NONE, 2).read(tokens)


def test_stop_is_legal_first_only_and_ends_the_action() -> None:
    grammar = TextGrammar(end=0, max_tokens=5, first=(7,), between=(6,), repeats=1)
    assert grammar.mask(()) == (True, (7,))
    assert grammar.mask((7,)) == (False, (0,))
    assert grammar.mask((1,)) == (True, (6,))


def test_queries_are_separated_at_most_max_queries_minus_one_times() -> None:
    grammar = TextGrammar(end=0, max_tokens=9, first=(7,), between=(6,), repeats=1)
    assert grammar.mask((1, 6)) == (True, ())  # no two separators in a row
    assert grammar.mask((1, 6, 2)) == (True, ())  # and none after the last


def test_one_query_has_no_separator(marked: Template) -> None:
    assert Queries(1).grammar(marked).mask((300,)) == (True, ())
    assert Queries(1).grammar(marked).mask(()) == (True, marked.literal(MARKERS.stop))


@pytest.mark.parametrize("layout", ["marked", "plain"])
@pytest.mark.parametrize("value", [(), ("Ann Lee",), ("Ann Lee", "Bo Ray teacher"), ("a", "b", "c")])
def test_queries_read_back_as_written(layout: str, value: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    template: Template = request.getfixturevalue(layout)
    action = Queries(3, 40)
    tokens = action.write(template, value)
    assert tokens[-1] == template.end
    assert action.read(template, tokens) == value


def test_more_queries_than_allowed_are_cut_and_repeated_ones_merge(plain: Template) -> None:
    tokens = Queries(9).write(plain, ("x1", "x1", "y2", "z3"))
    assert Queries(2).read(plain, tokens) == ("x1", "y2")


@pytest.mark.parametrize("text", ["", "...", "|| ||", "?!"])
def test_text_without_a_letter_is_no_query(text: str, plain: Template) -> None:
    with pytest.raises(MalformedError, match="no query"):
        Queries(2).read(plain, (*plain.text(text), plain.end))


def test_query_that_merely_begins_with_the_stop_word_is_a_query(plain: Template) -> None:
    assert Queries(1).read(plain, (*plain.text("STOPOVER town"), plain.end)) == ("STOPOVER town",)
    assert Queries(1).read(plain, (*plain.text("STOP"), plain.end)) == ()


def test_written_text_ends_with_the_end_token(marked: Template) -> None:
    assert FreeText().write(marked, "Ann Lee") == (*marked.text("Ann Lee"), marked.end)
    assert marked.decode(FreeText().write(marked, "Ann Lee")) == "Ann Lee"

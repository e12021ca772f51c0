"""Answer and passage scores against the official scripts' definitions and examples."""

from __future__ import annotations

import pytest

from jointrag.eval.metrics import Support, cover_em, exact_match, f1, normalise, recall_at_k, support


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\tsat. ", "cat sat"),
        ("an apple a day", "apple day"),
        ("theatre than Ann", "theatre than ann"),  # articles are whole words
        ("U.S.A.", "usa"),  # punctuation goes without leaving a space ...
        ("rock-and-roll", "rockandroll"),  # ... so hyphenated words melt together
        ("don't", "dont"),
        ("A.", ""),  # punctuation goes before articles: "a" is left and dropped
        ("the-end", "theend"),  # for the same reason this "the" is no article any more
        ("1990\u20131995", "1990\u20131995"),  # only ASCII punctuation is punctuation: the en dash stays
        ("Beyoncé", "beyoncé"),  # accents stay
        ("", ""),
    ],
)
def test_normalise_lowers_drops_punctuation_then_articles_then_space(text: str, expected: str) -> None:
    assert normalise(text) == expected


# prediction, aliases, EM, F1, cover-EM
SCORES = [
    # the three examples of the card of Hugging Face's `squad`, which wraps evaluate-v1.1.py; their means are the
    # card's: [1976] 100 and 100; [1999] 0 and 0; [1976, Beyonce, climate change] 66.67 and 66.67
    ("1976", ["1976"], 1.0, 1.0, 1.0),
    ("1999", ["1976"], 0.0, 0.0, 0.0),
    ("Beyonce", ["Beyoncé and Bruno Mars"], 0.0, 0.0, 0.0),  # no accent folding
    ("climate change", ["climate change"], 1.0, 1.0, 1.0),
    # multiset overlap: same = 2, P = 2/3, R = 2/2, F1 = 2 * 2/3 / (5/3) = 0.8 (a set would say 1.0)
    ("the cat cat sat", ["cat sat"], 0.0, 0.8, 1.0),
    ("cat sat", ["the cat cat sat"], 0.0, 0.8, 0.0),  # F1 is symmetric: P = 2/2, R = 2/3
    ("cat cat", ["cat cat dog"], 0.0, 0.8, 0.0),  # same = 2, P = 2/2, R = 2/3
    ("rock", ["rock n roll"], 0.0, 0.5, 0.0),  # P = 1, R = 1/3: 2/3 / (4/3)
    ("rock n roll", ["rock"], 0.0, 0.5, 1.0),  # cover-EM looks for gold in prediction, not the reverse
    ("The Eiffel Tower!", ["eiffel tower"], 1.0, 1.0, 1.0),
    ("sat cat", ["cat sat"], 0.0, 1.0, 0.0),  # F1 does not see order
    ("it is in Paris, France", ["Paris"], 0.0, 1 / 3, 1.0),  # P = 1/5, R = 1: 2/5 / (6/5)
    # HotpotQA's rule: yes, no, noanswer match whole or score 0 ...
    ("yes", ["yes"], 1.0, 1.0, 1.0),
    ("Yes.", ["yes"], 1.0, 1.0, 1.0),
    ("yes", ["no"], 0.0, 0.0, 0.0),
    ("yes it is", ["yes"], 0.0, 0.0, 1.0),  # gold is special: SQuAD's F1 would be 0.5
    ("no", ["no one knows"], 0.0, 0.0, 0.0),  # prediction is special: SQuAD's F1 would be 0.5
    ("no answer", ["noanswer"], 0.0, 0.0, 0.0),
    ("noanswer", ["noanswer"], 1.0, 1.0, 1.0),
    ("yes and no", ["yes or no"], 0.0, 2 / 3, 0.0),  # neither side is special as a whole: P = R = 2/3
    # ... for that alias only: the other one gives P = 1/3, R = 1
    ("yes it is", ["yes", "is"], 0.0, 0.5, 1.0),
    # the maximum over aliases, never their join (F1 against "new york city big apple" would be 4/7)
    ("big apple", ["New York City", "the Big Apple"], 1.0, 1.0, 1.0),
    ("York", ["New York City", "New York"], 0.0, 2 / 3, 0.0),  # max of 0.5 and 2 * 1/2 / (3/2)
    # the scripts' corners, kept
    ("Norway", ["no"], 0.0, 0.0, 1.0),  # a substring of characters
    ("the", ["a"], 1.0, 0.0, 1.0),  # both normalise to nothing: EM 1, F1 0
    ("cat", ["the"], 0.0, 0.0, 1.0),  # nothing is a substring of everything
    ("", ["cat"], 0.0, 0.0, 0.0),
    # jointrag's abstention is an answer like any other
    ("Unknown.", ["unknown"], 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize(("prediction", "answers", "em", "token_f1", "cover"), SCORES)
def test_answer_scores_are_those_of_the_official_scripts(
    prediction: str, answers: list[str], em: float, token_f1: float, cover: float
) -> None:
    assert exact_match(prediction, answers) == em
    assert f1(prediction, answers) == pytest.approx(token_f1, abs=1e-12)
    assert cover_em(prediction, answers) == cover


@pytest.mark.parametrize("score", [exact_match, f1, cover_em])
def test_answer_scores_refuse_a_bare_string_and_no_alias(score) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"got the string 'cat'.*write \['cat'\]"):
        score("cat", "cat")  # would be read as the aliases c, a, t
    with pytest.raises(ValueError, match="got no alias"):
        score("cat", [])


@pytest.mark.parametrize(
    ("passages", "gold", "expected"),
    [
        (["a", "b"], ["a", "b"], Support(1.0, 1.0, 1.0)),
        (["a", "x", "y", "z"], ["a", "b"], Support(1 / 2, 1 / 4, 1 / 3)),  # 2 * 1/8 / (3/4) = 1/3
        (["a", "a", "x"], ["a", "a"], Support(1.0, 1 / 2, 2 / 3)),  # sets: held twice counts once
        (["x"], ["a"], Support(0.0, 0.0, 0.0)),
        ([], ["a"], Support(0.0, 0.0, 0.0)),  # an empty selection is not precise
        (["x"], [], None),  # no gold: nothing to find, so left out
        ([], [], None),
    ],
)
def test_support_counts_hits_over_sets_of_passages(
    passages: list[str], gold: list[str], expected: Support | None
) -> None:
    scores = support(passages, gold)
    if expected is None:
        assert scores is None
    else:
        assert scores is not None
        assert (scores.recall, scores.precision, scores.f1) == pytest.approx(
            (expected.recall, expected.precision, expected.f1), abs=1e-12
        )


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, 0.0), (2, 1 / 3), (3, 1 / 3), (4, 2 / 3), (9, 2 / 3)],  # gold at ranks 2 and 4, a third one missed
)
def test_recall_at_k_counts_gold_among_the_first_k(k: int, expected: float) -> None:
    assert recall_at_k(["x", "a", "y", "b"], {"a", "b", "c"}, k) == pytest.approx(expected, abs=1e-12)


def test_recall_at_k_is_none_without_gold_and_refuses_k_below_one() -> None:
    assert recall_at_k(["x"], [], 5) is None
    with pytest.raises(ValueError, match="k: got 0"):
        recall_at_k(["x"], ["x"], 0)


def test_passage_scores_refuse_a_bare_string() -> None:
    with pytest.raises(ValueError, match="passages: got the string 'p1'"):
        support("p1", ["p1"])
    with pytest.raises(ValueError, match="gold: got the string 'p1'"):
        support(["p1"], "p1")
    with pytest.raises(ValueError, match="ranked: got the string 'p1'"):
        recall_at_k("p1", ["p1"], 1)

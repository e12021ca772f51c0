from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from jointrag.data.errors import GraphError
from jointrag.graph.conditions import CONDITIONS, Condition, compile_condition, register

PLUGIN = ModuleType("mine")
exec(
    "def enough(state, n: int = 1): return len(state.get('evidence') or ()) >= n\n"
    "async def later(state): return True\nclass Thing: pass\nnumber = 3\n",
    PLUGIN.__dict__,
)
KEYS = ("question", "pending", "hop", "verdict")


def compiled(spec: Any, max_hops: int | None = 3) -> Condition:
    return compile_condition(spec, plugins={"mine": PLUGIN}, keys=KEYS, max_hops=max_hops)


@pytest.mark.parametrize(
    ("spec", "state", "outcome"),
    [
        ("wants_search", {"pending": ["q"], "hop": 2}, True),
        ("wants_search", {"pending": ["q"], "hop": 3}, False),  # max_hops is 3
        ("wants_search", {"pending": []}, False),
        ("wants_search", {}, False),
        ({"hop_below": {"n": 2}}, {"hop": 1}, True),
        ({"hop_below": {"n": 2}}, {"hop": 2}, False),
        ({"hop_below": 2}, {}, True),  # one parameter needs no name; no hop yet is 0
        ({"field_equals": {"key": "verdict", "value": "retry"}}, {"verdict": "retry"}, True),
        ({"field_equals": {"key": "verdict", "value": "retry"}}, {}, False),
        ({"field_equals": {"key": "verdict", "value": None}}, {}, True),
        ({"empty": {"key": "pending"}}, {"pending": []}, True),
        ({"empty": "pending"}, {}, True),
        ({"empty": "hop"}, {"hop": 0}, False),  # a number is not empty
        ({"empty": "verdict"}, {"verdict": "x"}, False),
        ({"not": "wants_search"}, {}, True),
        ({"not": {"not": "wants_search"}}, {}, False),
        ({"all": ["wants_search", {"hop_below": 2}]}, {"pending": ["q"], "hop": 1}, True),
        ({"all": ["wants_search", {"hop_below": 2}]}, {"pending": ["q"], "hop": 2}, False),
        ({"any": ["wants_search", {"hop_below": 2}]}, {"hop": 1}, True),
        ({"any": ["wants_search", {"hop_below": 2}]}, {"hop": 2}, False),
        ("mine.enough", {"evidence": [1]}, True),
        ({"mine.enough": {"n": 2}}, {"evidence": [1]}, False),
        ({"mine.enough": 1}, {"evidence": [1]}, True),
    ],
)
def test_a_condition_decides(spec: Any, state: dict[str, Any], outcome: bool) -> None:
    assert compiled(spec)(state) is outcome


def test_without_a_limit_wants_search_asks_the_state_alone() -> None:
    assert compiled("wants_search", max_hops=None)({"pending": ["q"], "hop": 99})


@pytest.mark.parametrize(
    ("spec", "when_true", "when_false"),
    [
        ("wants_search", True, False),
        ({"hop_below": 2}, True, False),
        ({"field_equals": {"key": "verdict", "value": 1}}, False, False),
        ("mine.enough", False, False),
        ({"not": "wants_search"}, False, True),
        ({"all": ["mine.enough", {"hop_below": 2}]}, True, False),  # true: hop < 2; false: may be the plugin's doing
        ({"any": ["mine.enough", {"hop_below": 2}]}, False, False),
        ({"any": ["wants_search", {"hop_below": 2}]}, True, False),
        ({"any": ["mine.enough", {"not": {"hop_below": 2}}]}, False, True),  # false: not (not hop < 2)
    ],
)
def test_a_condition_knows_which_outcome_cannot_last(spec: Any, when_true: bool, when_false: bool) -> None:
    assert (compiled(spec).bounded(True), compiled(spec).bounded(False)) == (when_true, when_false)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wants_serch", "unknown condition 'wants_serch'.*Did you mean 'wants_search'"),
        ({"hop_bellow": {"n": 2}}, "Did you mean 'hop_below'"),
        ({"hop_below": {"m": 2}}, r"if\.hop_below\.m: got an unknown parameter, expected one of n"),
        ({"hop_below": {}}, "got no 'n', expected it"),
        ("hop_below", "got no 'n', expected it"),
        ({"hop_below": {"n": "2"}}, r"if\.hop_below\.n: got '2', expected a valid integer"),
        ({"field_equals": "retry"}, r"write \{field_equals: \{key: \.\., value: \.\.\}\}"),
        ({"field_equals": {"key": "verdit", "value": 1}}, "got the key 'verdit'.*Did you mean 'verdict'"),
        ({"wants_search": 3}, "expected its parameters by name; write wants_search"),
        ({"all": []}, r"if\.all: got \[\], expected a list of conditions"),
        ({"all": "wants_search"}, "expected a list of conditions"),
        ({"any": ["wants_search", "x"]}, r"if\.any\.1: got the unknown condition 'x'"),
        ({"not": None}, r"if\.not: got nothing"),
        ({"empty": "hop", "hop_below": 2}, "expected a condition.*combine several with all, any, not"),
        (True, "got True, expected a condition"),
        ("state['hop'] < 2", "unknown condition"),  # never eval
        ("mine.enogh", "mine has no 'enogh'.*Did you mean 'enough'"),
        ("yours.enough", r"`plugins` names mine\.py.*add `plugins: \[yours\.py\]`"),
        ("mine.number", "got 'mine.number', expected a function"),
        ("mine.Thing", "got 'mine.Thing', expected a function"),
        ("mine.later", "got the coroutine function 'mine.later'"),
    ],
)
def test_a_bad_condition_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        compiled(spec)


def test_a_registered_condition_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONDITIONS, "never", lambda state: True)
    register("never", lambda state: False)
    assert not compiled("never")({})

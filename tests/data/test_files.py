from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jointrag.data.errors import DataError
from jointrag.data.files import corpus_fingerprint, read_corpus, read_questions
from jointrag.data.types import Passage

GOOD_PASSAGE = '{"id": "p0", "title": "Otter", "text": "wet fur"}'
GOOD_QUESTION = '{"id": "q0", "question": "Who?", "answers": ["Ann"], "supporting_ids": ["p0"]}'


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(*lines: str | bytes) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        return path

    return write_file


def row(**fields: Any) -> str:
    return json.dumps(fields)


def question(**changes: Any) -> str:
    fields = {"id": "q1", "question": "Who?", "answers": ["Ann"], "supporting_ids": ["p0"]} | changes
    return json.dumps({k: v for k, v in fields.items() if v is not ...})


def test_the_simple_corpus_form_is_read_in_order(write: Any) -> None:
    path = write(GOOD_PASSAGE, "", row(id="p1", title="", text="no title", extra=[1]))
    assert read_corpus(path) == [Passage("p0", "Otter", "wet fur"), Passage("p1", "", "no title")]


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Ed Wood"\nA film.', "Ed Wood", "A film."),  # Search-R1's and FlashRAG's wiki18
        ("Ed Wood\nA film.\nIn two lines.", "Ed Wood", "A film.\nIn two lines."),
        ('"Ed Wood"', "Ed Wood", ""),
        ("A film.", "", "A film."),
        ('"So it goes" is a phrase.', "", '"So it goes" is a phrase.'),
        ('"A" and "B"', "", '"A" and "B"'),
        ('"', "", '"'),
    ],
)
def test_flashrag_contents_give_title_and_text(write: Any, contents: str, title: str, text: str) -> None:
    assert read_corpus(write(row(id="p0", contents=contents))) == [Passage("p0", title, text)]


def test_numbers_as_ids_are_read_as_text(write: Any) -> None:
    assert read_corpus(write(row(id=7, contents="x y")))[0].id == "7"
    assert read_questions(write(question(id=3, supporting_ids=[7])), {"7"})[0].supporting_ids == ("7",)


def test_a_byte_order_mark_windows_lines_and_line_separators_in_text_are_harmless(write: Any) -> None:
    path = write(b"\xef\xbb\xbf" + GOOD_PASSAGE.encode() + b"\r", row(id="p1", title="x", text="a\u2028b\x85c") + "\r")
    assert [p.text for p in read_corpus(path)] == ["wet fur", "a\u2028b\x85c"]
    raw = write('{"id": "p1", "title": "x", "text": "a\u2028b"}')
    assert read_corpus(raw)[0].text == "a\u2028b"


def test_both_question_forms_are_read(write: Any) -> None:
    path = write(
        question(
            type="bridge", hops=2, gold_queries=[["a", "b"], "c"], supporting_ids=["p1", "p0", "p1"], level="hard"
        ),
        row(id="q2", question="Where?", golden_answers=["Rome", "Roma"], metadata={"x": 1}),
    )
    first, second = read_questions(path, {"p0", "p1"})
    assert (first.kind, first.hops, first.gold_queries) == ("bridge", 2, (("a", "b"), ("c",)))
    assert first.supporting_ids == ("p1", "p0") and first.answers == ("Ann",)
    assert second.answers == ("Rome", "Roma") and second.supporting_ids == () and second.kind == ""


def test_without_a_corpus_gold_ids_are_not_checked(write: Any) -> None:
    assert read_questions(write(question(supporting_ids=["elsewhere"])))[0].supporting_ids == ("elsewhere",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: got broken JSON"),
        ('{"id": "p1"', "line 2: got broken JSON"),
        ("[" * 100_000, "line 2: got broken JSON"),  # too deep
        ("[1]", "line 2: got a list, expected a JSON object"),
        ("null", "line 2: got a NoneType, expected a JSON object"),
        (b'{"id": "p1", "title": "caf\xe9", "text": "x"}', "line 2: got byte 0xe9 at position 27, expected UTF-8"),
        ("{}", "line 2, field 'id': got a line without it"),
        (row(title="t", text="x"), "line 2, field 'id': got a line without it .*it has 'title', 'text'"),
        (row(id="p1", title="t"), "line 2, field 'text': got a line without it"),
        (row(id="p1", text="x"), "line 2, field 'title': got a line without it"),
        (row(id="p1", titel="t", text="x"), "line 2, field 'title': got a line without it .*'titel'"),
        (row(id="p0", title="t", text="x"), r"line 2, field 'id': got 'p0' again \(first on line 1\)"),
        (row(id="", title="t", text="x"), "line 2, field 'id': got ''"),
        (row(id=None, title="t", text="x"), r"line 2, field 'id': got None \(NoneType\)"),
        (row(id=True, title="t", text="x"), r"line 2, field 'id': got True \(bool\)"),
        (row(id=1.5, title="t", text="x"), r"line 2, field 'id': got 1.5 \(float\)"),
        (row(id="p1", title=5, text="x"), r"line 2, field 'title': got 5 \(int\), expected a string"),
        (row(id="p1", title="t", text=["x"]), r"line 2, field 'text': got \['x'\] \(list\), expected a string"),
        (row(id="p1", title="t", text=None), r"line 2, field 'text': got None \(NoneType\)"),
        (row(id="p1", title=" ", text=" "), "line 2, field 'text': got a passage without title and text"),
        (row(id="p1", contents=""), "line 2, field 'contents': got ''"),
        (row(id="p1", contents=9), r"line 2, field 'contents': got 9 \(int\)"),
        (row(id="p1", title="t", text="\ud800"), "line 2, field 'text': got an unpaired surrogate"),
    ],
)
def test_a_bad_passage_names_file_line_and_field(write: Any, line: str | bytes, message: str) -> None:
    path = write(GOOD_PASSAGE, line)
    with pytest.raises(DataError, match=message) as caught:
        read_corpus(path)
    told = str(caught.value)
    assert told.startswith(str(path)) and "expected" in told and ";" in told and len(told) < 500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "q1", "question": "Who', "line 2: got broken JSON"),
        (question(id=...), "line 2, field 'id': got a line without it"),
        (question(id="q0"), r"line 2, field 'id': got 'q0' again \(first on line 1\)"),
        (question(question=...), "line 2, field 'question': got a line without it"),
        (question(question="  "), "line 2, field 'question': got '  ', expected some words"),
        (question(question=["Who?"]), r"line 2, field 'question': got \['Who\?'\] \(list\)"),
        (question(answers=...), "line 2, field 'answers': got a line without it .*golden_answers"),
        (question(answers=[]), "line 2, field 'answers': got an empty list"),
        (question(answers="Ann"), r"line 2, field 'answers': got 'Ann' \(str\), expected a list of strings"),
        (question(answers=[1912]), "line 2, field 'answers': got 1912 in the list"),
        (question(answers=["Ann", " "]), "line 2, field 'answers': got ' ' in the list"),
        (question(answers=["\udfff"]), "line 2, field 'answers': got an unpaired surrogate"),
        (question(answers=..., golden_answers=[]), "line 2, field 'golden_answers': got an empty list"),
        (question(supporting_ids="p0"), r"line 2, field 'supporting_ids': got 'p0' \(str\), expected a list"),
        (question(supporting_ids=[None]), r"line 2, field 'supporting_ids': got None \(NoneType\)"),
        (question(supporting_ids=["p0", "p9"]), "line 2, field 'supporting_ids': got 'p9', which is no passage"),
        (question(type=3), r"line 2, field 'type': got 3 \(int\)"),
        (question(hops="2"), r"line 2, field 'hops': got '2' \(str\), expected a whole number"),
        (question(hops=-1), r"line 2, field 'hops': got -1"),
        (question(hops=True), r"line 2, field 'hops': got True \(bool\)"),
        (question(gold_queries="who"), r"line 2, field 'gold_queries': got 'who' \(str\), expected a list"),
        (question(gold_queries=[["a", ""]]), "line 2, field 'gold_queries': got '' among the queries"),
        (question(gold_queries=[3]), "line 2, field 'gold_queries': got 3 among the queries"),
    ],
)
def test_a_bad_question_names_file_line_and_field(write: Any, line: str, message: str) -> None:
    path = write(GOOD_QUESTION, line)
    with pytest.raises(DataError, match=message) as caught:
        read_questions(path, {"p0"})
    told = str(caught.value)
    assert told.startswith(str(path)) and "expected" in told and ";" in told


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(write: Any, content: bytes) -> None:
    for read in (read_corpus, read_questions):
        with pytest.raises(DataError, match="got an empty file, expected"):
            read(write(content))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for read in (read_corpus, read_questions):
        with pytest.raises(DataError, match=r"nowhere.jsonl: got no such file"):
            read(tmp_path / "nowhere.jsonl")
        with pytest.raises(DataError, match="got a folder"):
            read(tmp_path)
        with pytest.raises(DataError, match=r"expected a readable jsonl file"):
            read("/proc/self/mem")  # opens, then fails to read


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_file_is_refused(write: Any) -> None:
    path = write(GOOD_PASSAGE)
    path.chmod(0)
    with pytest.raises(DataError, match="Permission denied"):
        read_corpus(path)


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"id": ' + "7" * 5000 + ', "title": "t", "text": "x"}\n')
    with pytest.raises(DataError, match="line 1: got broken JSON"):
        read_corpus(tmp_path / "c.jsonl")


def test_the_fingerprint_sees_every_field_the_order_and_the_borders() -> None:
    base = [Passage("a", "b", "c"), Passage("d", "e", "f")]
    others = [
        base[::-1],
        base[:1],
        [Passage("a", "b", "c"), Passage("d", "e", "g")],
        [Passage("a", "bc", ""), Passage("d", "e", "f")],
        [Passage("a", "", "bc"), Passage("d", "e", "f")],
    ]
    marks = {corpus_fingerprint(p) for p in (base, *others)}
    assert len(marks) == 6 and all(len(m) == 64 for m in marks)
    assert corpus_fingerprint(list(base)) == corpus_fingerprint(base)

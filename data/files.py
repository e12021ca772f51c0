"""Corpora and question sets in their published jsonl forms, checked line by line by ourselves.

    corpus      {"id","title","text"}  or FlashRAG's {"id","contents"}
    questions   {"id","question","answers":[..],"supporting_ids":[..]}  or FlashRAG's {"id","question","golden_answers"}
                optional: "type" (-> kind), "hops", "gold_queries" ([[..],..]: per hop, in parallel)

`datasets` would turn a mixed-type column silently into Json and a missing key into None; here every fault is a
DataError that names file, line and field. Other fields are ignored. Numbers as ids are read as their decimal text.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NoReturn

from jointrag.data.errors import DataError
from jointrag.data.types import Passage, Question

SHOWN = 60  # characters of a wrong value that an error message quotes


def read_corpus(path: str | Path) -> list[Passage]:
    """Read a corpus file; passages keep the file's order."""
    passages: list[Passage] = []
    seen: dict[str, int] = {}
    for row in _rows(Path(path), "corpus"):
        passage_id = row.new_id(seen)
        if "contents" in row.fields and "text" not in row.fields:
            title, text = _split_contents(row.text("contents"))
        else:
            title = row.text("title", blank=True, missing='add "title": "" if the passage has none')
            text = row.text("text", blank=True, missing='give {"id","title","text"} or {"id","contents"}')
        if not (title.strip() or text.strip()):
            row.fail("text", "a passage without title and text", "some words", "remove the line or fill it")
        passages.append(Passage(passage_id, title, text))
    return passages


def read_questions(path: str | Path, corpus_ids: AbstractSet[str] | None = None) -> list[Question]:
    """Read a question file; with `corpus_ids`, gold ids outside of them are refused (None = not checked)."""
    questions: list[Question] = []
    seen: dict[str, int] = {}
    for row in _rows(Path(path), "questions"):
        question_id = row.new_id(seen)
        gold = tuple(dict.fromkeys(row.ids("supporting_ids")))
        for gold_id in gold:
            if corpus_ids is not None and gold_id not in corpus_ids:
                row.fail(
                    "supporting_ids",
                    f"{gold_id!r}, which is no passage of the corpus",
                    "ids of passages",
                    "use the corpus these questions were made for, or correct the id",
                )
        questions.append(
            Question(
                id=question_id,
                question=row.text("question"),
                answers=row.answers(),
                supporting_ids=gold,
                gold_queries=row.gold_queries(),
                hops=row.count("hops"),
                kind=row.text("type", blank=True) if row.fields.get("type") is not None else "",
            )
        )
    return questions


def corpus_fingerprint(passages: Sequence[Passage]) -> str:
    """Sha256 over every passage's id, title and text, in order, each with its length: no two corpora coincide."""
    digest = hashlib.sha256()
    for passage in passages:
        for field in (passage.id, passage.title, passage.text):
            raw = field.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<Q", len(raw)))
            digest.update(raw)
    return digest.hexdigest()


def _split_contents(contents: str) -> tuple[str, str]:
    """FlashRAG's contents: the first line is the title when text follows it or when it stands in quotes."""
    first, newline, rest = contents.partition("\n")
    stripped = first.strip()
    quoted = len(stripped) > 2 and stripped[0] == stripped[-1] == '"' and '"' not in stripped[1:-1]
    if not newline and not quoted:
        return "", contents.strip()
    return (stripped[1:-1] if quoted else stripped), rest.strip()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


class _Row:
    """One line of a file and the ways to take a checked field out of it."""

    def __init__(self, path: Path, line: int, fields: dict[str, Any]) -> None:
        self.path, self.line, self.fields = path, line, fields

    def fail(self, field: str, got: str, expected: str, do: str) -> NoReturn:
        raise DataError(f"{self.path}, line {self.line}, field {field!r}: got {got}, expected {expected}; {do}.")

    def need(self, field: str, do: str = "") -> Any:
        if field not in self.fields:
            have = ", ".join(repr(k) for k in self.fields) or "no field"
            self.fail(field, f"a line without it (it has {have})", "the field", do or f'add "{field}"')
        return self.fields[field]

    def clean(self, field: str, value: str) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.fail(field, f"an unpaired surrogate in {ascii(value)[:SHOWN]}", "valid Unicode", "repair the text")
        return value

    def text(self, field: str, *, blank: bool = False, missing: str = "") -> str:
        value = self.need(field, missing)
        if not isinstance(value, str):
            self.fail(field, f"{_shown(value)} ({type(value).__name__})", "a string", "put the value in quotes")
        if not blank and not value.strip():
            self.fail(field, _shown(value), "some words", "fill the field or remove the line")
        return self.clean(field, value)

    def id_of(self, field: str, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip():
            self.fail(
                field, f"{_shown(value)} ({type(value).__name__})", "a non-empty string", "give each id as a string"
            )
        return self.clean(field, value)

    def new_id(self, seen: dict[str, int]) -> str:
        new = self.id_of("id", self.need("id"))
        if new in seen:
            self.fail(
                "id",
                f"{new!r} again (first on line {seen[new]})",
                "an id of its own",
                "rename or remove one of the two",
            )
        seen[new] = self.line
        return new

    def list_of(self, field: str, value: object, of: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(
                field, f"{_shown(value)} ({type(value).__name__})", f"a list of {of}", "put square brackets around it"
            )
        return value

    def ids(self, field: str) -> list[str]:
        if self.fields.get(field) is None:
            return []
        return [self.id_of(field, v) for v in self.list_of(field, self.fields[field], "passage ids")]

    def answers(self) -> tuple[str, ...]:
        field = "golden_answers" if "golden_answers" in self.fields and "answers" not in self.fields else "answers"
        values = self.list_of(field, self.need(field, 'add "answers": [..] or "golden_answers": [..]'), "strings")
        if not values:
            self.fail(field, "an empty list", "at least one answer", 'give ["unknown"] for an unanswerable question')
        for value in values:
            if not isinstance(value, str) or not value.strip():
                self.fail(field, f"{_shown(value)} in the list", "non-empty strings", "write each answer as a string")
            self.clean(field, value)
        return tuple(values)

    def gold_queries(self) -> tuple[tuple[str, ...], ...]:
        field = "gold_queries"
        if self.fields.get(field) is None:
            return ()
        hops: list[tuple[str, ...]] = []
        for hop in self.list_of(field, self.fields[field], "queries, or of lists of queries, one a hop"):
            queries = hop if isinstance(hop, list) else [hop]
            for query in queries:
                if not isinstance(query, str) or not query.strip():
                    self.fail(
                        field, f"{_shown(query)} among the queries", "non-empty strings", "write each query as a string"
                    )
                self.clean(field, query)
            hops.append(tuple(queries))
        return tuple(hops)

    def count(self, field: str) -> int:
        value = self.fields.get(field)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(
                field, f"{_shown(value)} ({type(value).__name__})", "a whole number >= 0", "write it without quotes"
            )
        return int(value)


def _rows(path: Path, what: str) -> Iterator[_Row]:
    """The lines of a jsonl file as objects; a file without any is an error."""
    if path.is_dir():
        raise DataError(f"{path}: got a folder, expected a jsonl file ({what}); name the file inside it.")
    count = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is legal and means nothing
                if raw.strip():
                    count += 1
                    yield _Row(path, number, _object(path, number, raw))
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: got no such file, expected a jsonl file ({what}); check the path: it is relative to the working "
            f"directory, {Path.cwd()}."
        ) from error
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(
            f"{path}: got {why!r}, expected a readable jsonl file ({what}); check the file and its rights."
        ) from error
    if not count:
        raise DataError(
            f"{path}: got an empty file, expected {what} with one JSON object a line; fill the file or name another."
        )


def _object(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        line = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: got byte 0x{raw[error.start]:02x} at position {error.start + 1}, expected UTF-8; "
            f"convert the file (for example iconv -f latin1 -t utf-8)."
        ) from error
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # broken, or a number of thousands of digits
        raise DataError(
            f"{where}: got broken JSON ({error}) in {_shown(line.strip())}, expected one JSON object a line; "
            f"repair the line."
        ) from error
    if not isinstance(fields, dict):
        raise DataError(
            f"{where}: got a {type(fields).__name__}, expected a JSON object; write one object {{..}} a line."
        )
    return fields

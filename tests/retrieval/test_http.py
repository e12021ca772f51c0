from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from jointrag.data.errors import RetrievalError
from jointrag.data.types import Passage
from jointrag.retrieval import Index, build_index

CORPUS = [Passage("0", "Otter", "wet fur"), Passage("1", "Heron", "long legs"), Passage("2", "Lynx", "sharp ears")]


@contextmanager
def serving(answer: Callable[[dict[str, Any]], bytes]) -> Iterator[Index]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield build_index({"type": "http", "url": f"http://127.0.0.1:{http.server_address[1]}/retrieve"}, CORPUS)
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def test_one_call_carries_all_queries_in_search_r1s_form() -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> bytes:
        asked.append(request)
        hit = {"document": {"id": "2", "contents": '"Lynx"\nsharp ears'}, "score": 0.5}
        return json.dumps({"result": [[hit] for _ in request["queries"]]}).encode()

    with serving(answer) as index:
        hits = index.search(["ears", "fur"], 2)
    assert asked == [{"queries": ["ears", "fur"], "topk": 2, "return_scores": True}]
    # the server gave one hit; the second place is filled in row order with score 0
    assert [h.ids for h in hits] == [("2", "0"), ("2", "0")]
    assert hits[0].scores.tolist() == [0.5, 0.0]


def test_a_server_without_scores_is_read_by_rank_and_numbers_are_ids() -> None:
    with serving(
        lambda r: json.dumps({"result": [[{"id": 1, "contents": ""}, {"id": 0}, {"id": 1}]]}).encode()
    ) as index:
        (hits,) = index.search(["legs"], 3)
    assert hits.ids == ("1", "0", "2")
    assert hits.scores.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "expected a JSON answer"),
        (b"[]", "one result list for each of 1 queries"),
        (b'{"result": []}', "one result list for each of 1 queries"),
        (b'{"result": [[{"document": {"id": "77"}}]]}', "got document id '77'"),
        (b'{"result": [["0"]]}', "got document id None"),
        (b'{"result": [[{"document": {"id": "0"}, "score": "high"}]]}', "got score 'high'"),
        (b'{"result": [[{"document": {"id": "0"}, "score": NaN}]]}', "got score nan"),
    ],
)
def test_a_servers_wrong_answer_is_a_retrieval_error(body: bytes, message: str) -> None:
    with serving(lambda _: body) as index, pytest.raises(RetrievalError, match=message):
        index.search(["otter"], 1)


def test_a_server_that_is_not_there_is_a_retrieval_error() -> None:
    index = build_index({"type": "http", "url": "http://127.0.0.1:9/retrieve", "timeout": 2}, CORPUS)
    with pytest.raises(RetrievalError, match=r"127.0.0.1:9.*start the server"):
        index.search(["otter"], 1)

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jointrag.data.types import Passage
from jointrag.retrieval import Index, build_index
from jointrag.retrieval.registry import INDEXES

ANIMALS = ("otter", "heron", "badger", "lynx", "marten", "plover")
PLACES = ("river", "marsh", "forest")
TYPES = sorted(INDEXES)


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    """48 passages: 6 animals x 3 places told apart by their words, then 30 with one and the same text (ties)."""
    told = [
        Passage(f"p{a}{p}", f"{animal.title()} {place}", f"The {animal} lives by the {place} and eats {animal} food.")
        for a, animal in enumerate(ANIMALS)
        for p, place in enumerate(PLACES)
    ]
    return told + [Passage(f"same{i:02d}", "Pebble", "A grey pebble lies on a grey beach.") for i in range(30)]


@pytest.fixture(scope="session")
def server(passages: list[Passage]) -> Iterator[str]:
    """A server that speaks Search-R1's /retrieve: score = words in common, ties in row order."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"result": [answer(q, asked["topk"]) for q in asked["queries"]]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    def answer(query: str, topk: int) -> list[dict[str, Any]]:
        words = set(query.lower().split())
        scored = [(len(words & set(f"{p.title} {p.text}".lower().split())), p) for p in passages]
        best = sorted(scored, key=lambda pair: -pair[0])[:topk]
        return [{"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": float(s)} for s, p in best]

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}/retrieve"
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture(scope="session")
def settings(server: str) -> Callable[[str], dict[str, Any]]:
    """The settings under which a registered type is tested: small, and without a model."""

    def of(name: str) -> dict[str, Any]:
        return {"type": name, "dim": 16} | ({"url": server} if name == "http" else {})

    return of


@pytest.fixture(scope="session", params=TYPES)
def index(request: pytest.FixtureRequest, passages: list[Passage], settings: Callable[[str], dict[str, Any]]) -> Index:
    """One index of every registered type."""
    return build_index(settings(request.param), passages)

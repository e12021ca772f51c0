"""One tokenisation for BM25 and TF-IDF: words of two letters and more, lower case, no stop words, Snowball stems.

The stop words are bm25s' own 33. On hotpotqa (train + dev) this is what reaches recall@5 of 73.0 with BM25.
"""

from __future__ import annotations

from collections.abc import Sequence

from jointrag.data.types import Passage

PROGRESS_FROM = 50_000  # texts from which tokenising and indexing take more than two seconds and show a bar


def passage_text(passage: Passage) -> str:
    """What is indexed of a passage: title, a line break, text."""
    return f"{passage.title}\n{passage.text}"


def printable(text: str) -> str:
    """The text with unpaired surrogates replaced: a model may emit any bytes, tokenisers take valid Unicode only."""
    return text.encode("utf-8", "replace").decode("utf-8")


def tokenize(texts: Sequence[str]) -> list[list[str]]:
    """Stems of every text, in order; a text without a known kind of word gives an empty list."""
    import bm25s
    import Stemmer

    if not texts:
        return []
    tokens = bm25s.tokenize(
        [printable(t) for t in texts],
        stopwords="english",
        stemmer=Stemmer.Stemmer("english"),
        return_ids=False,
        show_progress=len(texts) >= PROGRESS_FROM,
    )
    return [[token for token in row if token] for row in tokens]

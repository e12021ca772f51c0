"""`python -m jointrag.marl.baselines RUN`: what a run compares itself with, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from jointrag.data.errors import JointragError
from jointrag.marl.run import baselines


def main() -> int:
    """Do it; 2 where the user must change something."""
    torch.set_num_threads(1)
    try:
        baselines(Path(sys.argv[1]))
    except JointragError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

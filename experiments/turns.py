"""Processes that prepare their tasks at the same time, and measure one after the other.

All hold a lock on one file: shared while they prepare, exclusive while they measure. So no process
measures before all have prepared, and no two at a time. The lock belongs to an open file that a
process is started with, and is released when it ends.
"""

from __future__ import annotations

import fcntl
import os
from typing import IO, Any

_NAME = "REKINDLE_TURN"
_FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}  # per process


def as_one_of_several(file: IO[Any]) -> dict[str, Any]:
    """The options of a process that takes turns, by its own open file of the common path."""
    fcntl.flock(file, fcntl.LOCK_SH)
    told = {_NAME: str(file.fileno())}
    return {"pass_fds": (file.fileno(),), "env": {**_FEW_THREADS, **os.environ, **told}}


def take_turn() -> None:
    """Wait until this process may measure; return at once if it does not take turns."""
    if told := os.environ.get(_NAME):
        os.set_inheritable(int(told), False)
        fcntl.flock(int(told), fcntl.LOCK_EX)

"""Processes that prepare their tasks at the same time, and measure one after the other.

All hold one file: shared as long as they prepare, alone while they measure. So nobody measures
before all are prepared, and never two at a time. The lock is that of an open file which a process
is started with, and is gone when the process is.
"""

from __future__ import annotations

import fcntl
import os
from typing import IO, Any

_NAME = "REKINDLE_TURN"
_FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "3"}  # for each of several that compile


def as_one_of_several(file: IO[Any]) -> dict[str, Any]:
    """How to start a process that takes turns by a file of its own, opened from one path."""
    fcntl.flock(file, fcntl.LOCK_SH)
    told = {_NAME: str(file.fileno())}
    return {"pass_fds": (file.fileno(),), "env": {**_FEW_THREADS, **os.environ, **told}}


def take_turn() -> None:
    """Wait until this process may measure; at once where it does not take turns."""
    if told := os.environ.get(_NAME):
        os.set_inheritable(int(told), False)
        fcntl.flock(int(told), fcntl.LOCK_EX)

"""Keeps standard output clean of a line that HiGHS 1.12 prints whatever it is told."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_NOISE = b"HighsMipSolverData::"
_STDOUT = 1  # as C knows it: the solver is not written in Python
_one_at_a_time = Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back what is printed meanwhile; then let through all but the solver's line."""
    try:
        flush = ctypes.CDLL(None).fflush
        kept = os.dup(_STDOUT)
    except (OSError, TypeError, AttributeError):  # on Windows, or without a standard output
        yield
        return
    with _one_at_a_time, tempfile.TemporaryFile() as caught:
        flush(None)
        os.dup2(caught.fileno(), _STDOUT)
        try:
            yield
        finally:
            flush(None)
            os.dup2(kept, _STDOUT)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not line.startswith(_NOISE):
                    os.write(_STDOUT, line)

"""Defers Ctrl-C where an interrupt would leave objects half changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Finish the block before a SIGINT that arrives in it is handled.

    Yields a context manager for parts of the block in which SIGINT is handled at once. Only the
    main thread handles signals: in any other thread there is nothing to defer.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield nullcontext
        return
    came: list[FrameType | None] = []

    def defer(number: int, frame: FrameType | None) -> None:
        came.append(frame)

    @contextmanager
    def interruptible() -> Iterator[None]:
        try:
            signal.signal(signal.SIGINT, handler)
            if came:
                handler(signal.SIGINT, came.pop())
            yield
        finally:
            signal.signal(signal.SIGINT, defer)

    signal.signal(signal.SIGINT, defer)
    try:
        yield interruptible
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(signal.SIGINT, came[0])

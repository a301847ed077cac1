"""A process that runs random programs, one after another."""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.matrix.pool import be_quiet


def answer_requests(connection: Any) -> None:
    """In a worker: run programs until there are none."""
    be_quiet()
    logging.getLogger("rekindle").setLevel(logging.ERROR)
    from benchmarks.fuzz.cell import run

    while True:
        (seed,), _ = connection.recv()
        try:
            connection.send(run(seed))
        except Exception as error:  # of the fuzzer's own
            connection.send({"none": {"outcome": "raw", "reason": f"the fuzzer: {error!r}"}})

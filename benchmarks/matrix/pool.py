"""A worker process that runs models one after another, and is replaced when it dies."""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.matrix.zoo import Case

MAX_BYTES = 6 << 30  # of a worker
MAX_PARAMETERS = 30e6


def be_quiet() -> None:
    """One thread, no warnings of libraries, and not all of the machine's memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        import transformers

        transformers.logging.set_verbosity_error()
    except ImportError:
        pass


def answer_requests(connection: Any) -> None:
    """In a worker: answer requests until there are none."""
    be_quiet()
    from benchmarks.matrix.cell import run

    while True:
        case, budgets = connection.recv()
        connection.send(run(Case(*case), budgets))


def trains(connection: Any) -> None:
    """In a worker: whether a model trains, with the seconds of a step."""
    be_quiet()
    import torch

    from benchmarks.matrix.zoo import build, parameters_of, train_step

    while True:
        case, _ = connection.recv()
        try:
            size = parameters_of(Case(*case))
            if size > MAX_PARAMETERS and (case[0] == "transformers" or size < float("inf")):
                raise ValueError("the model is too large")
            torch.manual_seed(0)
            model, optimizer, batches = build(Case(*case))
            start = time.process_time()
            for batch in batches[:2]:
                loss = train_step(model, optimizer, batch)
            seconds = (time.process_time() - start) / 2
            if not torch.isfinite(loss):
                raise ValueError("the loss is not finite")
            connection.send({"seconds": seconds})
        except Exception as error:
            connection.send({"error": f"{type(error).__name__}: {error}"[:300]})


class Pool:
    """One worker process, replaced when it dies or takes too long."""

    def __init__(
        self,
        target: Callable[[Any], None],
        limit_s: float,
        start_s: float = 60.0,
        n_per_process: int = 25,  # so that memory cannot pile up
    ) -> None:
        """`limit_s` is for one answer; the first of a process may take `start_s` more."""
        self._target, self._limit_s, self._start_s = target, limit_s, start_s
        self._n_per_process = n_per_process
        self._process: Any = None
        self._n_asked = 0

    def ask(self, case: tuple[Any, ...], budgets: Sequence[str] = ()) -> dict[str, Any]:
        """The answer for a model, or what became of the process."""
        if self._n_asked % self._n_per_process == 0:
            self.end()
        self._n_asked += 1
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, other = context.Pipe()
            self._process = context.Process(target=self._target, args=(other,), daemon=True)
            self._process.start()
            other.close()
            limit_s = self._limit_s + self._start_s
        else:
            limit_s = self._limit_s
        try:
            self._connection.send((tuple(case), tuple(budgets)))
            if self._connection.poll(limit_s):
                return dict(self._connection.recv())
            ended = f"took more than {limit_s:.0f} s"
        except (EOFError, OSError):
            self._process.join(5)
            ended = f"the process died with exit code {self._process.exitcode}"
        self.end()
        return {"died": ended}

    def end(self) -> None:
        """Stop the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

"""The planner inside `torch.compile`: a budget for code that keeps its own training loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from rekindle.dynamo import aot
from rekindle.dynamo.session import LOWERS, PlannedGraph, Session

__all__ = ["LOWERS", "CompiledModel", "PlannedGraph", "Session", "backend", "compile"]

_OWN = ("budget", "planner", "lower")


class CompiledModel(aot.OptimizedModule):
    """A model as `torch.compile` returns it, with its plans.

    Parameters, state dicts, `train()` and `eval()` are the model's own.
    """

    # On the class, so as not to be the model's.
    session: Session = None  # type: ignore[assignment]
    how: dict[str, Any] = {}  # noqa: RUF012

    @property
    def plans(self) -> list[PlannedGraph]:
        """What was decided for each graph that was compiled so far, in the order they came."""
        return self.session.plans

    @property
    def measured_peak_bytes(self) -> int | None:
        """The most that was allocated on the GPU in the second step; None until it is over.

        Where the model was then compiled once more, it is the second step after that.
        """
        return self.session.measured_peak_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. The second training step is watched, and compared with the forecast."""
        if self.training and torch.is_grad_enabled():
            device = next((param.device for param in self.parameters()), None)
            peak_bytes = self.session.begin_step(device)
            session = self.session.with_room()
            if session is None and peak_bytes is not None:
                session = self.session.again(peak_bytes)
            if session is not None:
                self._use(session)
        return super().__call__(*args, **kwargs)

    def _use(self, session: Session) -> None:
        """Have the model compiled by a session, from the next call on."""
        found = torch.compile(self._orig_mod, backend=session, **self.how)
        assert isinstance(found, aot.OptimizedModule)
        aot.adopt(self, found)
        self.session = session
        self._show_signature()

    def _show_signature(self) -> None:
        """For those who look: the Hugging Face Trainer."""
        with suppress(AttributeError, ValueError):
            signature = inspect.signature(self._orig_mod.forward)
            self.forward.__signature__ = signature  # type: ignore[attr-defined]

    def report(self, path: str | Path) -> None:
        """Write the page about the plan; it opens in any browser, without a network."""
        self.session.report(path)


def compile(
    model: nn.Module,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    planner: str = "auto",
    lower: str = "inductor",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: dict[str, Any] | None = None,
) -> CompiledModel:
    """Compile a model as `torch.compile` does, with training kept within a memory budget.

    The budget ("8GiB", "60%" of what the compiled graph would need with nothing dropped, or bytes)
    bounds parameters, gradients, optimizer state and what forward and backward pass hold. Without
    the `optimizer`, its state is taken to be Adam's: two tensors for each parameter. A graph that
    cannot stay within it raises InfeasibleBudget when it is first called.

    `lower="eager"` runs the planned graphs operator by operator, where there is no compiler;
    `options` are Inductor's, as `torch.compile` takes them.

    >>> blocks = [(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    >>> model = nn.Sequential(*(layer for block in blocks for layer in block))
    >>> trained = compile(model, budget="80%", lower="eager")
    >>> trained(torch.ones(256, 8)).sum().backward()
    >>> [planned.plan.peak_bytes <= planned.plan.budget_bytes for planned in trained.plans]
    [True]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch Module, and is a {type(model).__name__}")
    session = Session(budget, planner, lower, dict(options or {}), model, optimizer)
    how: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    found = torch.compile(model, backend=session, **how)
    assert isinstance(found, aot.OptimizedModule)
    found.__class__ = CompiledModel
    assert isinstance(found, CompiledModel)
    found.session, found.how = session, how
    found._show_signature()
    return found


_sessions: dict[int, tuple[dict[str, Any], Session]] = {}  # by the options' identity


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What `torch.compile(model, backend="rekindle", options={"budget": "8GiB"})` calls.

    `options` has the budget, and may have "planner" and "lower", as in `compile`; all others are
    Inductor's. Every call of `torch.compile` with options of its own has a budget of its own.
    """
    if options is None or "budget" not in options:
        raise ValueError(
            'backend="rekindle" needs a budget: torch.compile(model, backend="rekindle", '
            'options={"budget": "8GiB"}).'
        )
    known = _sessions.get(id(options))
    if known is None:
        own = {name: options[name] for name in _OWN if name in options}
        others = {name: value for name, value in options.items() if name not in _OWN}
        session = Session(**own, options={**aot.mode_options(mode), **others})
        known = _sessions[id(options)] = options, session  # holds the options: ids are not reused
    return known[1](module, inputs)

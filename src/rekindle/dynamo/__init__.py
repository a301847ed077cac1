"""The planner inside `torch.compile`: a budget for code that keeps its own training loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from rekindle.core.notebook import html_table, one_line
from rekindle.dynamo import aot
from rekindle.dynamo.compile_pipeline import compile_graph
from rekindle.dynamo.planned_graph import PlannedGraph, write_report
from rekindle.dynamo.session import CompileOptions, Session
from rekindle.torch_internals import OptimizedModule, list_mode_options
from rekindle.units import format_bytes, format_us

__all__ = ["CompileOptions", "CompiledModel", "PlannedGraph", "Session", "backend", "compile"]

_OWN_OPTIONS = ("budget", "planner", "lower")


class CompiledModel(OptimizedModule):
    """A model as `torch.compile` returns it, with its plans.

    Parameters, state dicts, `train()` and `eval()` are the model's own.
    """

    # Declared on the class: an attribute of the instance would become one of the model.
    session: Session = None  # type: ignore[assignment]
    how: dict[str, Any] = {}  # noqa: RUF012

    @property
    def plans(self) -> list[PlannedGraph]:
        """The plans of the graphs compiled so far, in order."""
        return self.session.plans

    @property
    def measured_peak_bytes(self) -> int | None:
        """The peak of the second step on a GPU; None until it is over.

        If the model was recompiled after that, it is the second step since then.
        """
        return self.session.measured_peak_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. The second training step is monitored, and its peak compared."""
        if self.training and torch.is_grad_enabled():
            device = next((param.device for param in self.parameters()), None)
            session = self.session.begin_step(device)
            if session is not None:
                self._use(session)
        return super().__call__(*args, **kwargs)

    def _use(self, session: Session) -> None:
        """Have the model compiled by another session, from the next call on."""
        compiled = torch.compile(self._orig_mod, backend=_backend_of(session), **self.how)
        assert isinstance(compiled, OptimizedModule)
        aot.adopt(self, compiled)
        self.session = session
        self._show_signature()

    def _show_signature(self) -> None:
        """Show the model's own signature, which the Hugging Face Trainer inspects."""
        with suppress(AttributeError, ValueError):
            signature = inspect.signature(self._orig_mod.forward)
            self.forward.__signature__ = signature  # type: ignore[attr-defined]

    def report(self, path: str | Path) -> None:
        """Write the HTML report on the plans; it opens in any browser, without a network."""
        write_report(Path(path), self.plans)

    def _facts(self) -> dict[str, object]:
        facts: dict[str, object] = {"model": type(self._orig_mod).__name__}
        facts["budget"] = self.session.budget
        if not self.plans:
            return facts | {"graphs": "none compiled yet"}
        return facts | {
            "graphs": len(self.plans),
            "forecast peak": format_bytes(max(each.plan.peak_bytes for each in self.plans)),
            "added time": format_us(sum(each.plan.recompute_us for each in self.plans)),
        }

    __repr__ = one_line
    _repr_html_ = html_table


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

    The budget ("8GiB", "60%" of the compiled graph's peak with nothing dropped, or bytes) bounds
    parameters, gradients, optimizer state and the tensors of the forward and backward pass. Without
    the `optimizer`, its state is assumed to be Adam's: two tensors for each parameter. A graph that
    cannot stay within the budget raises InfeasibleBudget when it is first called.

    `lower="eager"` runs the planned graphs operator by operator, without a compiler; `options` are
    Inductor's, as `torch.compile` takes them.

    >>> blocks = [(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    >>> model = nn.Sequential(*(layer for block in blocks for layer in block))
    >>> trained = compile(model, budget="80%", lower="eager")
    >>> trained(torch.ones(256, 8)).sum().backward()
    >>> [planned.plan.peak_bytes <= planned.plan.budget_bytes for planned in trained.plans]
    [True]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch Module, and is of type {type(model).__name__}")
    session = Session(budget, planner, lower, dict(options or {}), model, optimizer)
    how: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    compiled = torch.compile(model, backend=_backend_of(session), **how)
    assert isinstance(compiled, OptimizedModule)
    compiled.__class__ = CompiledModel
    assert isinstance(compiled, CompiledModel)
    compiled.session, compiled.how = session, how
    compiled._show_signature()
    return compiled


def _backend_of(session: Session) -> Callable[..., Any]:
    def rekindle(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(module, inputs, session)

    return rekindle


# The options that each session was made for, and what they contained then. Compiled code holds its
# session: when the code goes, so does the entry.
_sessions: WeakKeyDictionary[Session, tuple[dict[str, Any], dict[str, Any]]] = WeakKeyDictionary()


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="rekindle", options={"budget": "8GiB"})`.

    `options` has the budget, and may have "planner" and "lower", as in `compile`; all others are
    Inductor's. Every call of `torch.compile` with options of its own has a budget of its own; so do
    options that were changed since.
    """
    if options is None or "budget" not in options:
        raise ValueError(
            'backend="rekindle" needs a budget: torch.compile(model, backend="rekindle", '
            'options={"budget": "8GiB"}).'
        )
    session = _session_of(options, mode)
    compiled = compile_graph(module, inputs, session)

    def run(*args: Any) -> Any:
        return compiled(*args)

    run.session = session  # type: ignore[attr-defined]
    return run


def _session_of(options: dict[str, Any], mode: str | None) -> Session:
    """The session of these very options as they are now: a known one, or a new one."""
    content = {**options, "mode": mode}
    for session, (given, before) in list(_sessions.items()):
        if given is options and before == content:
            return session
    own = {name: options[name] for name in _OWN_OPTIONS if name in options}
    others = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    of_mode = dict(list_mode_options(mode)) if mode else {}
    session = Session(**own, options={**of_mode, **others})
    _sessions[session] = options, content
    return session

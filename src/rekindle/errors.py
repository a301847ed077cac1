"""The exceptions that Rekindle raises, all of them subclasses of `RekindleError`."""

from __future__ import annotations


class RekindleError(Exception):
    """The base class of all exceptions of Rekindle."""


class ModelError(RekindleError):
    """A model does not exist, or cannot be built as requested."""


class UnitError(RekindleError, ValueError):
    """A quantity given as text, such as "8GiB", cannot be parsed."""


class CaptureError(RekindleError):
    """The training step cannot be captured as one graph.

    `filename` and `lineno` are the user's line; `advice` says what to write instead.

    >>> error = CaptureError("reads a value", filename="train.py", lineno=7, advice="Return it.")
    >>> print(error)
    train.py:7: reads a value
      Return it.
    """

    def __init__(self, problem: str, *, filename: str, lineno: int, advice: str) -> None:
        super().__init__(f"{filename}:{lineno}: {problem}\n  {advice}")
        self.problem = problem
        self.filename = filename
        self.lineno = lineno
        self.advice = advice


class ProfileError(RekindleError):
    """A profile cannot be made, read, or used with this graph."""


class RewriteError(RekindleError):
    """A plan cannot be applied to the captured step."""


class ReportError(RekindleError):
    """A page or figure cannot be made; the message says what to install."""


class PlanError(RekindleError):
    """A plan cannot be made, read, or used with this graph."""


class InfeasibleBudget(PlanError):
    """No plan was found that stays within the budget; `least_peak_bytes` is the smallest found.

    >>> raise InfeasibleBudget(budget_bytes=1 << 20, least_peak_bytes=1 << 21)
    Traceback (most recent call last):
    rekindle.errors.InfeasibleBudget: no plan stays within 1MiB: the least peak found is 2MiB
    """

    def __init__(self, *, budget_bytes: int, least_peak_bytes: int) -> None:
        from rekindle.units import format_budget  # which itself imports this module

        super().__init__(
            f"no plan stays within {format_budget(budget_bytes)}: the least peak found is "
            f"{format_budget(least_peak_bytes)}"
        )
        self.budget_bytes = budget_bytes
        self.least_peak_bytes = least_peak_bytes


class InvalidSchedule(PlanError):
    """A schedule breaks a rule; `subject` names the op or storage."""

    def __init__(self, subject: str, rule: str) -> None:
        super().__init__(f"{subject}: {rule}")
        self.subject = subject
        self.rule = rule


class InvalidLayout(PlanError):
    """Two storages that are live at the same time overlap, or one has no address.

    >>> raise InvalidLayout("relu", "its result lies over conv1, which is read later")
    Traceback (most recent call last):
    rekindle.errors.InvalidLayout: relu: its result lies over conv1, which is read later
    """

    def __init__(self, op: str, problem: str) -> None:
        super().__init__(f"{op}: {problem}")
        self.op = op
        self.problem = problem

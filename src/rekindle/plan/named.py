"""Planners by their names."""

from __future__ import annotations

from difflib import get_close_matches

from rekindle.errors import PlanError
from rekindle.plan import PLANNERS, Planner


def find_planner(name: str) -> Planner:
    """The planner of that name.

    >>> find_planner("nine")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rekindle.errors.PlanError: no planner named 'nine', did you mean 'none'? There are none, all...
    """
    found = PLANNERS.get(name) if isinstance(name, str) else None
    if found is None:
        close = get_close_matches(str(name), PLANNERS, n=1)
        hint = f", did you mean {close[0]!r}?" if close else "."
        raise PlanError(f"no planner named {name!r}{hint} There are {', '.join(PLANNERS)}.")
    return found

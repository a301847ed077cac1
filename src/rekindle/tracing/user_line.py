"""Finds the user's own line in a Python stack."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision
_PACKAGE = Path(__file__).parents[1]
# The zoo's models stand for a user's own.
_REKINDLE = tuple(str(path) for path in _PACKAGE.iterdir() if path.name != "models")
_MACHINERY = (_TORCH, *_REKINDLE, "<")  # "<" starts names of generated code
_LIBRARIES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
_LOSS_FUNCTIONS = frozenset(
    {
        *(name for name in dir(torch.nn.functional) if name.endswith("_loss")),
        "cross_entropy",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
    }
)


class Line(NamedTuple):
    """A place in somebody's source."""

    filename: str
    lineno: int


class CallSite(NamedTuple):
    """Where an operator was called from."""

    line: Line
    in_loss: bool


NOWHERE = Line("", 0)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site() -> CallSite:
    """The innermost line outside torch and Rekindle, and whether a loss of torch's ran there."""
    in_loss = False
    for frame in _frames(sys._getframe(1)):
        code = frame.f_code
        if not code.co_filename.startswith(_MACHINERY):
            return CallSite(Line(code.co_filename, frame.f_lineno), in_loss)
        if code.co_name in _LOSS_FUNCTIONS and code.co_filename.endswith("functional.py"):
            in_loss = True
    return CallSite(NOWHERE, in_loss)


def user_line(lines: list[Line], fallback: Line) -> Line:
    """The user's own line among those of a stack, innermost first: outside installed libraries."""
    outside = [line for line in lines if not line.filename.startswith(_MACHINERY)]
    own = [line for line in outside if not line.filename.startswith(_LIBRARIES)]
    return (own or outside or [fallback])[0]


def current_lines() -> list[Line]:
    """The lines of the current stack, innermost first."""
    return [Line(f.f_code.co_filename, f.f_lineno) for f in _frames(sys._getframe(1))]


def traceback_lines(traceback: TracebackType | None) -> list[Line]:
    """The lines of a traceback, innermost first."""
    lines = []
    while traceback is not None:
        lines.append(Line(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return lines[::-1]


def definition(function: Callable[..., Any]) -> Line:
    """The line on which a function, a partial or a callable object is defined."""
    function = getattr(function, "func", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__", function)
    code = getattr(function, "__code__", None)
    return Line(code.co_filename, code.co_firstlineno) if code is not None else NOWHERE

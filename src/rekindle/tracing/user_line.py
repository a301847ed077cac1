"""Finds the user's own line in a Python stack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchvision
_PACKAGE = Path(__file__).parents[1]
# The built-in models count as the user's code.
_REKINDLE = tuple(str(path) for path in _PACKAGE.iterdir() if path.name != "models")
# Code that is made at run time; that of a user has names like "<stdin>" and "<ipython-input-1>".
_GENERATED = ("<frozen", "<eval_with_key>", "<rekindle ", "<__array_function__", "<torch_package")
_INTERNAL = (_TORCH, *_REKINDLE, *_GENERATED)
# Where torch computes the results of operators on fake tensors.
_FAKES = ("_meta_registrations.py", "_refs", "_prims", "_decomp", "_subclasses", "_inductor")
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
_LOSS_FUNCTIONS = frozenset(
    {
        *(name for name in dir(torch.nn.functional) if name.endswith("_loss")),
        *("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
    }
)


class Line(NamedTuple):
    """A line of a source file."""

    filename: str
    lineno: int


NOWHERE = Line("", 0)


def frames() -> Iterator[FrameType]:
    """The current frames, innermost first."""
    return _frames(sys._getframe(1))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site() -> tuple[Line, bool]:
    """The innermost line outside torch and Rekindle; True if it calls torch's loss functions."""
    in_loss = False
    for frame in _frames(sys._getframe(1)):
        code = frame.f_code
        if not code.co_filename.startswith(_INTERNAL):
            return Line(code.co_filename, frame.f_lineno), in_loss
        if code.co_name in _LOSS_FUNCTIONS and code.co_filename.endswith("functional.py"):
            in_loss = True
    return NOWHERE, in_loss


def user_line(lines: list[Line], fallback: Line) -> Line:
    """The innermost of these lines, innermost first, that is not in an installed library."""
    outside = [line for line in lines if not line.filename.startswith(_INTERNAL)]
    own = [line for line in outside if _LIBRARY_FOLDERS.isdisjoint(Path(line.filename).parts)]
    return (own or outside or [fallback])[0]


# What to do about parts of libraries that read values, by the path of the file that does.
_ADVICE = {
    "torch/amp/grad_scaler.py": "GradScaler skips steps by the values of gradients: train in "
    "bfloat16, which needs no scaler, or in float32.",
    "torch/nn/utils/clip_grad.py": "error_if_nonfinite=True reads the norm's value: leave it out, "
    "return the norm, and look at it after the step.",
    "torch/distributions/": "Distributions check the values of their arguments: pass "
    "validate_args=False, or call torch.distributions.Distribution.set_default_validate_args(False)"
    " before.",
    "torchvision/models/detection/": "Detection models choose boxes by their values, so that "
    "shapes change in every step: train the backbone with rekindle.optimize, or the whole model "
    "with rekindle.compile.",
    "transformers/integrations/moe.py": "Choose another implementation of the experts: "
    'model.set_experts_implementation("batched_mm").',
}


class Place(NamedTuple):
    """The user's line; what stands beside it in a message, and the advice for it."""

    line: Line
    within: str  # " (in library.py:7)", or nothing if the user's own line is the innermost
    advice: str | None  # if the library is known


def place(lines: list[Line], fallback: Line) -> Place:
    """Where something happens, from lines that are given innermost first."""
    own = user_line(lines, fallback)
    within = ""
    for line in lines:
        if line.filename.startswith((*_GENERATED, *_REKINDLE)):
            continue
        path = line.filename.replace(os.sep, "/")
        advice = next((text for part, text in _ADVICE.items() if part in path), None)
        if advice is not None:
            return Place(own, f" (in {line.filename}:{line.lineno})", advice)
        if line == own:
            break
        if not within and not line.filename.startswith(_TORCH):
            within = f" (in {line.filename}:{line.lineno})"
    return Place(own, within, None)


def is_in_fakes(line: Line) -> bool:
    """True for a line of torch's operators on fake tensors."""
    return line.filename.startswith(tuple(_TORCH + name for name in _FAKES))


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
    """The line that defines a function, a partial or a callable object."""
    function = getattr(function, "func", function)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__", function)
    code = getattr(function, "__code__", None)
    return Line(code.co_filename, code.co_firstlineno) if code is not None else NOWHERE

"""Loads the workload that a user names: a model of the zoo, or a function in a file."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rekindle.errors import ModelError, RekindleError
from rekindle.models.workload import Workload, check_settings
from rekindle.models.zoo.catalog import MODELS, build, did_you_mean
from rekindle.torch_internals import pytree

EXPECTED = "(train_step, model, optimizer, batch)"


def load(
    spec: str, *, batch: int | None = None, precision: str | None = None, device: str | None = None
) -> Workload:
    """Build the workload that ``spec`` names: a zoo model, or ``path/to/file.py:function``.

    The function returns ``(train_step, model, optimizer, batch)``. It may take the arguments
    ``batch``, ``precision`` and ``device``, and is called with those that are not None.

    >>> load("mlp", batch=2).batch_size
    2
    >>> load("resnet-tinny")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    rekindle.errors.ModelError: no model named 'resnet-tinny', did you mean 'resnet-tiny'? ...
    """
    if ":" not in spec and not spec.endswith(".py"):
        if spec not in MODELS:
            raise ModelError(
                f"no model named {spec!r}{did_you_mean(spec, MODELS)};"
                " or path/to/file.py:function for one of your own"
            )
        return build(spec, batch=batch, precision=precision or "fp32", device=device or "cpu")

    given: dict[str, Any] = {"batch": batch, "precision": precision, "device": device}
    asked = {name: value for name, value in given.items() if value is not None}
    check_settings(**asked)
    return _from_file(spec, asked)


def split_spec(spec: str) -> tuple[Path, str]:
    """The file and the function that ``path/to/file.py:function`` names; the file exists."""
    path_text, _, function_name = spec.rpartition(":")
    if not path_text or not function_name:
        path_text = spec.rstrip(":")
        raise ModelError(f"{spec!r} names a file but no function: write {path_text}:function")
    path = Path(path_text)
    if not path.is_file():
        raise ModelError(f"no file {path_text!r}, from {spec!r}: expected path/to/file.py:function")
    if path.suffix != ".py":
        raise ModelError(f"{path_text!r} is not a Python file: its name must end in .py")
    return path, function_name


def _from_file(spec: str, asked: dict[str, Any]) -> Workload:
    path, function_name = split_spec(spec)
    with _importable(path.resolve().parent):
        module = _import_file(path)
        function = _find_function(module, function_name, str(path))
        _check_call(function, spec, asked)
        try:
            returned = function(**asked)
        except RekindleError:
            raise
        except Exception as error:
            raise ModelError(f"{spec} raised {type(error).__name__}: {error}") from error
    return _to_workload(spec, returned, asked)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the user's file import files of its folder, as if it were run as a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _import_file(path: Path) -> ModuleType:
    # The name depends on the whole path: two files called train.py must not replace each other.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"rekindle_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None  # a .py file always has a spec with a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up while it runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ModelError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _find_function(module: ModuleType, name: str, path: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not own:
        raise ModelError(f"{path} has no function {name!r}, nor any other")
    raise ModelError(f"{path} has no function {name!r}{did_you_mean(name, own)}")


def _check_call(function: Callable[..., Any], spec: str, asked: dict[str, Any]) -> None:
    """Raise a readable error where the call would raise a TypeError."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for name, value in asked.items():
        if name not in by_keyword and not takes_any:
            raise ModelError(
                f"{spec} takes no argument {name!r}, so that {name} {value} cannot reach it:"
                f" add the argument to the function, or do not ask for a {name}"
            )
    for p in parameters:
        optional = p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if optional or (p.name in asked and p.name in by_keyword):
            continue
        if p.name in ("batch", "precision", "device") and p.name in by_keyword:
            raise ModelError(f"{spec} needs {p.name!r}: give --{p.name}, or a default")
        raise ModelError(
            f"{spec} needs an argument {p.name!r}, which cannot be given here:"
            " only batch, precision and device can; give it a default"
        )


def _to_workload(spec: str, returned: Any, asked: dict[str, Any]) -> Workload:
    wrong = _what_is_wrong(returned)
    if wrong:
        raise ModelError(f"{spec} must return {EXPECTED}, but {wrong}")
    train_step, model, optimizer, batch = returned
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    rows = next((leaf.shape[0] for leaf in leaves if leaf.dim()), None)
    home = next(model.parameters(), leaves[0] if leaves else torch.empty(0)).device
    return Workload(
        name=spec,
        train_step=train_step,
        model=model,
        optimizer=optimizer,
        batch=batch,
        batch_size=asked.get("batch", rows),
        precision=asked.get("precision", "fp32"),
        device=str(home),
    )


def _what_is_wrong(returned: Any) -> str | None:
    if not isinstance(returned, tuple | list):
        return "it returned None" if returned is None else f"its result is {_a(returned)}"
    if len(returned) != 4:
        kinds = ", ".join(type(item).__name__ for item in returned)
        return f"it returned {len(returned)} things: ({kinds})"
    train_step, model, optimizer, _ = returned
    if not callable(train_step) or isinstance(train_step, nn.Module):
        return f"its train_step is {_a(train_step)}, not a function"
    if not isinstance(model, nn.Module):
        return f"its model is {_a(model)}, not a torch.nn.Module"
    if not isinstance(optimizer, Optimizer):
        return f"its optimizer is {_a(optimizer)}, not a torch.optim.Optimizer"
    return None


def _a(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"

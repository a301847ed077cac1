"""Private names of torch are in one file, and a torch that was not checked is named."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rekindle import torch_internals

SRC = Path(torch_internals.__file__).parent


def private_names(source: str) -> Iterator[str]:
    """Names in torch that begin with an underscore; operators (`torch.ops.aten._x`) are public.

    >>> list(private_names("from torch._ops import OpOverload"))
    ['torch._ops.OpOverload']
    >>> list(private_names("import torch._inductor.config as config; import torch.nn"))
    ['torch._inductor.config']
    >>> list(private_names("torch._C._x(torch.ops.aten._to_copy, torch.__version__)"))
    ['torch._C._x', 'torch._C']
    >>> list(private_names("from torch import _foreach_add_"))
    ['torch._foreach_add_']
    >>> list(private_names("getattr(torch, '_C'); import_module('torch._guards')"))
    ['torch._guards']
    """
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            root, *parts = name.split(".")
            is_operator = parts[:1] == ["ops"]
            private = [part for part in parts if re.match("_[^_]", part)]
            if root == "torch" and private and not is_operator:
                yield name


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Attribute():
            name = ast.unparse(node)
            return [name] if re.fullmatch(r"[\w.]+", name) else []
        case ast.Constant(value=str(text)) if text.startswith("torch._"):
            return [text]
    return []


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {
        f"{path.relative_to(SRC)}: {name}"
        for path in sorted(SRC.rglob("*.py"))
        if path.name != "torch_internals.py"
        for name in private_names(path.read_text(encoding="utf-8"))
    }
    assert found == set()


def test_every_compiler_name_exists() -> None:
    for name in torch_internals._COMPILER:
        assert getattr(torch_internals, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torch_internals.nothing


def test_every_name_that_is_imported_exists() -> None:
    """mypy does not see it: names of the compiler are looked up when they are first used."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rekindle.torch_internals":
                for alias in node.names:
                    assert hasattr(torch_internals, alias.name), f"{path.name}: {alias.name}"


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_an_old_torch_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"2.11 or newer, and this is torch {version[:4]}"):
        torch_internals.check_version(version)


@pytest.mark.parametrize("version", ["2.99.0", "3.0.0a0+git123"])
def test_a_torch_that_was_not_checked_is_named(version: str) -> None:
    with pytest.warns(UserWarning, match=f"not checked with torch {version[:4]}"):
        torch_internals.check_version(version)


def test_a_checked_torch_is_fine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_internals.check_version(torch.__version__)
        for version in torch_internals.CHECKED_ON:
            torch_internals.check_version(f"{version}.0")

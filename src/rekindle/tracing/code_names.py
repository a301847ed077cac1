"""The names in a function's bytecode: globals, attributes, and how they are used."""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch

# Code of these folders runs without being noted: its state is torch's, or does not matter.
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_SITE = ("site-packages", "dist-packages")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_OWN_MODELS = _PACKAGE + "models" + os.sep  # built-in models count as the user's code
_INTERNAL = tuple(str(Path(m.__file__ or "").parent) + os.sep for m in (torch, np))
# What torch itself stands on, and runs while a step is traced.
_BELOW_TORCH = tuple(
    str(Path(torch.__file__).parents[1] / name)
    for name in ("typing_extensions.py", "sympy", "mpmath", "networkx", "triton", "functorch")
)
_WHOLESALE = {"vars", "__dict__", "asdict", "astuple"}
_LOADS = (
    "LOAD_FAST",
    "LOAD_DEREF",
    "LOAD_GLOBAL",
    "LOAD_CONST",
    "LOAD_ATTR",
    "PUSH",
    "PRECALL",
    "KW",
)
_BY_TEXT = {"globals", "modules", "import_module", "__import__", "builtins"}
_WHOLE_DICTS = {"items", "values", "keys", "copy", "get", "pop", "setdefault"}
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter"}


@dataclass(frozen=True)
class CodeNames:
    """The names in a function's code."""

    globals: frozenset[str]
    attributes: frozenset[str]
    is_wholesale: bool
    texts: frozenset[str]  # constants, which may be names, too: getattr(config, "weight")
    uses_of: dict[str, set[str]]  # how a name is used: "append", "add", "set" or "read"
    stored_at: dict[str, int]  # lines
    loaded_at: dict[str, int]
    chains: frozenset[tuple[str, ...]]  # a loaded name and the attributes read of it: a.b.c
    imports: dict[str, str]  # modules that the function itself imports, by its name for them
    imported: frozenset[tuple[str, str]]  # from module import name
    is_by_text: bool = False  # reads globals or modules by text: globals()["weight"]
    is_by_key: bool = False  # reads settings of the optimizer whose names are not constants


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> CodeNames:
    if not is_noted(code):
        return _NO_NAMES
    loaded_globals, attributes = set(), set()
    uses: dict[str, set[str]] = {}
    stored: dict[str, int] = {}
    loaded: dict[str, int] = {}
    chains: set[tuple[str, ...]] = set()
    imports: dict[str, str] = {}
    imported: set[tuple[str, str]] = set()
    line = code.co_firstlineno
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP")]
    for index, each in enumerate(instructions):
        line = each.starts_line if type(each.starts_line) is int else line
        if each.opname in ("LOAD_CONST", "COPY_FREE_VARS") or not isinstance(each.argval, str):
            continue
        name = each.argval
        if each.opname.startswith("LOAD") and "ATTR" not in each.opname:
            rest = [i for i in instructions[index + 1 : index + 12] if i.opname != "COPY"]
            following = itertools.takewhile(_is_attribute, rest)
            chains.add((name, *(str(i.argval) for i in following)))
        if each.opname == "IMPORT_NAME":
            target = instructions[index + 1]
            imports[str(target.argval) if target.opname.startswith("STORE") else ""] = name
            for part in instructions[index + 1 :: 2]:  # each is followed by the store of its value
                if part.opname != "IMPORT_FROM":
                    break
                imported.add((name, str(part.argval)))
        if "GLOBAL" in each.opname or each.opname.endswith("_NAME"):
            loaded_globals.add(name)
        elif "ATTR" in each.opname or "METHOD" in each.opname:
            attributes.add(name)
        if each.opname.startswith(("STORE", "DELETE")):
            stored.setdefault(name, line)
            if not any(i.opname == "BINARY_OP" for i in instructions[max(0, index - 2) : index]):
                uses.setdefault(name, set()).add("set")
        elif each.opname.startswith("LOAD"):
            loaded.setdefault(name, line)
            uses.setdefault(name, set()).add(_use(instructions[index : index + 5]))
    texts = frozenset(text for text in _strings(code.co_consts) if text.isidentifier())
    return CodeNames(
        frozenset(loaded_globals),
        texts.union(attributes),
        not _WHOLESALE.isdisjoint(code.co_names) or _names_at_run_time(instructions),
        texts,
        uses,
        stored,
        loaded,
        frozenset(chains),
        imports,
        frozenset(imported),
        not _BY_TEXT.isdisjoint(code.co_names),
        "param_groups" in code.co_names and _reads_by_key(code, instructions),
    )


_NO_NAMES = CodeNames(
    frozenset(), frozenset(), False, frozenset(), {}, {}, {}, frozenset(), {}, frozenset()
)


def _reads_by_key(code: CodeType, instructions: list[dis.Instruction]) -> bool:
    """True if a function may read dict entries whose keys are no constants."""
    pairs = itertools.pairwise(instructions)
    computed = any(
        second.opname == "BINARY_SUBSCR" and first.opname != "LOAD_CONST" for first, second in pairs
    )
    return computed or not _WHOLE_DICTS.isdisjoint(code.co_names)


def _names_at_run_time(instructions: list[dis.Instruction]) -> bool:
    """True if an attribute may be read whose name is no constant: `getattr(config, name)`."""
    for index, each in enumerate(instructions):
        if each.opname.startswith("LOAD") and each.argval in _BY_NAME:
            arguments = itertools.takewhile(
                lambda i: not i.opname.startswith("CALL"), instructions[index + 1 :]
            )
            found = list(arguments)
            only_loads = all(i.opname.startswith(_LOADS) for i in found)
            if not (only_loads and any(map(_is_name, found))):
                return True  # the name may be computed
    return False


def _is_name(instruction: dis.Instruction) -> bool:
    value = instruction.argval
    return "CONST" in instruction.opname and isinstance(value, str) and value.isidentifier()


def _is_attribute(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")


def _use(instructions: list[dis.Instruction]) -> str:
    """How a name that the first of these instructions loads is used."""
    name, *rest = instructions
    if rest and rest[0].opname in ("LOAD_METHOD", "LOAD_ATTR"):
        return "append" if rest[0].argval in ("append", "extend", "appendleft") else "read"
    operations = [each.opname for each in rest[:2]]
    if operations == ["LOAD_CONST", "BINARY_OP"] and rest[1].argrepr == "+=":
        stored = [each.argval for each in rest[2:] if each.opname.startswith("STORE")]
        return "add" if stored[:1] == [name.argval] else "read"
    return "read"


def _strings(constants: tuple[Any, ...]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, (tuple, frozenset)):
            yield from _strings(tuple(each))


@functools.cache
def is_noted_file(filename: str) -> bool:
    """True for code of the user and of libraries; not of torch, numpy, Python and Rekindle."""
    if filename.startswith(_STDLIB) and not any(
        f"{os.sep}{site}{os.sep}" in filename for site in _SITE
    ):
        return False
    if filename.startswith(_PACKAGE):
        return filename.startswith(_OWN_MODELS)
    return not filename.startswith((*_INTERNAL, *_BELOW_TORCH, "<frozen", "<__array_function__"))


def is_noted(code: CodeType) -> bool:
    """True if a function's state is part of a step's state."""
    return is_noted_file(code.co_filename)


def is_noted_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    if cls.__module__ in sys.builtin_module_names:
        return False
    return module is None or is_noted_file(getattr(module, "__file__", None) or "")


def is_of_torch_file(filename: str) -> bool:
    """True for files of torch and numpy."""
    return filename.startswith(_INTERNAL)


def is_of_torch(module: types.ModuleType | None) -> bool:
    return module is not None and (getattr(module, "__file__", None) or "").startswith(_INTERNAL)

"""The import rules between the layers, checked on the source text: nothing is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
MAX_LINES = 450

# torchvision and transformers import torch, so whoever may not import torch may not import them.
TORCH = ("torch", "functorch", "torchvision", "transformers")
EXTRAS = ("matplotlib", "plotly", "torchvision", "transformers")
ABOVE_PLAN = tuple(f"rekindle.{layer}" for layer in ("fx", "report", "models", "api", "cli"))


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports, and whether the import runs when the module is imported."""

    module: str
    lineno: int
    target: str
    at_import: bool


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules under `inside`, or all but those under `outside`, import nothing under `targets`."""

    why: str
    targets: tuple[str, ...]
    inside: tuple[str, ...] = ("rekindle",)
    outside: tuple[str, ...] = ()
    at_import_only: bool = False

    def forbids(self, found: Import) -> bool:
        return (
            _under(found.target, self.targets)
            and _under(found.module, self.inside)
            and not _under(found.module, self.outside)
            and (found.at_import or not self.at_import_only)
        )


RULES = (
    Rule(
        "core and plan are the lowest layers",
        ABOVE_PLAN,
        inside=("rekindle.core", "rekindle.planners"),
    ),
    Rule("fx and plan never import each other", ("rekindle.planners",), inside=("rekindle.fx",)),
    Rule("the report does not import fx", ("rekindle.fx",), inside=("rekindle.report",)),
    Rule(
        "only the command line imports the models",
        ("rekindle.models",),
        outside=("rekindle.cli", "rekindle.models"),
    ),
    Rule(
        "only fx, who composes it, models and cli touch torch",
        TORCH,
        outside=tuple(
            f"rekindle.{name}"
            for name in ("fx", "dynamo", "api", "arrange", "fit", "models", "cli")
        ),
    ),
    Rule("an optional package is imported where it is used", EXTRAS, at_import_only=True),
)
FRONT = "core and plan do not import the package's front, which imports api"


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule, as one line of text each.

    A package's own file is named with its `__init__`, so that relative imports can be resolved:

    >>> violations({"rekindle.core.__init__": "from ..fx import lift"})
    ['rekindle.core.__init__:1 imports rekindle.tracing.lift: core and plan are the lowest layers']
    >>> violations({"rekindle.tracing.lift": "from ..core import ir"})
    []
    """
    modules = {name.removesuffix(".__init__") for name in sources}
    found = [each for name, text in sources.items() for each in imports(name, text)]
    broken = [(each, rule.why) for each in found for rule in RULES if rule.forbids(each)]
    broken += [(each, FRONT) for each in found if _reaches_front(each, modules)]
    return [f"{i.module}:{i.lineno} imports {i.target}: {why}" for i, why in broken]


def imports(module: str, source: str) -> Iterator[Import]:
    """What a module imports, by statement or by `import_module("…")`, inside functions too."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for target in _targets(module, node):
            yield Import(module, node.lineno, target, at_import)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not in_function)

    yield from visit(ast.parse(source), at_import=True)


def _targets(module: str, node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=base, names=names, level=level):
            if level:
                package = module.split(".")[:-level]
                base = ".".join([*package, base] if base else package)
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(target)), *_],
        ):
            return [target]
    return []


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def _reaches_front(found: Import, modules: set[str]) -> bool:
    """Whether core or plan imports `rekindle` itself or a name from it that is no module."""
    in_package = {*modules, "rekindle.core", "rekindle.planners", *ABOVE_PLAN} - {"rekindle"}
    return (
        _under(found.module, ("rekindle.core", "rekindle.planners"))
        and (found.target == "rekindle" or found.target.rpartition(".")[0] == "rekindle")
        and found.target not in in_package
    )


def _source_tree() -> dict[str, str]:
    return {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted((SRC / "rekindle").rglob("*.py"))
    }


def test_the_source_tree_keeps_the_rules() -> None:
    sources = _source_tree()
    assert "rekindle.core.graph.graph" in sources
    assert violations(sources) == []


def test_every_module_can_be_read_in_one_sitting() -> None:
    lines = {name: len(text.splitlines()) for name, text in _source_tree().items()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("rekindle.core.graph.graph", "import torch", "torch"),
        ("rekindle.core.graph.graph", "import torch.nn as nn", "torch.nn"),
        ("rekindle.core.graph.graph", "def f():\n    from torch import Tensor", "torch.Tensor"),
        ("rekindle.core.graph.graph", "if TYPE_CHECKING:\n    import torch", "torch"),
        ("rekindle.core.graph.graph", "async def f():\n    import torchvision", "torchvision"),
        (
            "rekindle.core.graph.graph",
            "import importlib\nimportlib.import_module('torch')",
            "torch",
        ),
        ("rekindle.core.graph.graph", "__import__('torch')", "torch"),
        (
            "rekindle.core.graph.graph",
            "from rekindle.tracing.operators import facts",
            "rekindle.tracing.operators.facts",
        ),
        ("rekindle.core.graph.graph", "from ..report import html", "rekindle.report.html"),
        ("rekindle.core.graph.graph", "import rekindle", "rekindle"),
        ("rekindle.core.graph.graph", "from rekindle import optimize", "rekindle.optimize"),
        ("rekindle.core.__init__", "from .. import api", "rekindle.api"),
        ("rekindle.planners.greedy", "import torch", "torch"),
        ("rekindle.planners.greedy", "from rekindle import cli", "rekindle.cli"),
        ("rekindle.planners.greedy", "from ..fx import lift", "rekindle.tracing.lift"),
        ("rekindle.planners.__init__", "from ..fx import lift", "rekindle.tracing.lift"),
        ("rekindle.tracing.lift", "from ..plan import PLANNERS", "rekindle.planners.PLANNERS"),
        ("rekindle.tracing.lift", "import rekindle.planners", "rekindle.planners"),
        ("rekindle.report.html", "from rekindle.fx import lift", "rekindle.tracing.lift"),
        ("rekindle.report.html", "def f():\n    import torch", "torch"),
        ("rekindle.api", "from .models import zoo", "rekindle.models.zoo"),
        ("rekindle.__init__", "from . import models", "rekindle.models"),
        ("rekindle.__init__", "import torch", "torch"),
        ("rekindle.units", "import torch", "torch"),
        ("rekindle.report.html", "import plotly.graph_objects", "plotly.graph_objects"),
        ("rekindle.report.figures", "try: ...\nfinally:\n    import matplotlib", "matplotlib"),
        ("rekindle.models.zoo.vision", "class A:\n    import torchvision", "torchvision"),
        (
            "rekindle.models.zoo.text",
            "from transformers import GPT2Config",
            "transformers.GPT2Config",
        ),
    ],
)
def test_a_broken_rule_is_named(module: str, source: str, target: str) -> None:
    first, *_ = violations({module: source})
    last_line = len(source.splitlines())
    assert first.startswith(f"{module}:{last_line} imports {target}: ")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rekindle.core.graph.graph", "import numpy\nfrom . import roles\nfrom .roles import Role"),
        ("rekindle.core.graph.graph", "import torchless"),
        (
            "rekindle.planners.greedy",
            "from ..core.ir import StepGraph\nfrom rekindle.core import ir",
        ),
        ("rekindle.planners.greedy", "from scipy.optimize import milp"),
        ("rekindle.tracing.lift", "import torch\nfrom ..core import ir"),
        ("rekindle.api", "import torch\nfrom . import fx, plan\nfrom .report import html"),
        ("rekindle.__init__", "from .api import optimize"),
        ("rekindle.cli", "from .models import zoo\nimport torch"),
        ("rekindle.models.zoo.vision", "import torch\ndef f():\n    import torchvision"),
        ("rekindle.models.__init__", "from rekindle.models import vision"),
        ("rekindle.report.html", "def f():\n    from plotly import graph_objects"),
    ],
)
def test_a_kept_rule_is_not_reported(module: str, source: str) -> None:
    assert violations({module: source}) == []


def test_a_known_module_beside_the_layers_is_not_the_front() -> None:
    source = "from ..errors import PlanError\nfrom rekindle import errors"
    assert violations({"rekindle.core.graph.graph": source, "rekindle.errors": ""}) == []

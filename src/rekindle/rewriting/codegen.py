"""Writes a recorded step as plain Python code: one operator a line, in captured order.

Each name is deleted after its last use, so that memory is freed exactly as early as in the plain
step.
"""

from __future__ import annotations

import itertools
import linecache
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from rekindle.torch_internals import OpOverload, set_grad_enabled

_serial = itertools.count()


@dataclass
class Code:
    """A function in the making: its lines, and the objects its code refers to by name."""

    parameters: str
    lines: list[str] = field(default_factory=list)
    scope: dict[str, Any] = field(default_factory=dict)

    def compile(self) -> tuple[str, Callable[..., Any]]:
        """The source, for people and tracebacks, and the function."""
        lines = [f"def step({self.parameters}):", *(f"    {line}" for line in self.lines)]
        source = "\n".join(lines) + "\n"
        filename = f"<rekindle step {next(_serial)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec"), self.scope)
        return source, self.scope["step"]

    def add_calls(
        self,
        nodes: Sequence[fx.Node],
        *,
        frees: Mapping[fx.Node, Sequence[fx.Node]],
        grad_enabled: Mapping[fx.Node, bool],
        functions: Mapping[fx.Node, Callable[..., Any]],
    ) -> None:
        """Write the nodes' calls, and after each the deletion of the names it frees.

        `grad_enabled` is what kernels see of autograd's mode; the code starts with it on.
        `functions` has what to call for nodes whose target is not it.
        """
        is_enabled = True
        for node in nodes:
            if grad_enabled.get(node, is_enabled) != is_enabled:
                is_enabled = not is_enabled
                self.lines.append(f"{self._name(set_grad_enabled)}({is_enabled})")
            call = self._call(node, functions.get(node, node.target))
            freed = frees.get(node, ())
            dead = [other.name for other in freed if other is not node]
            self.lines.append(call if node in freed else f"{node.name} = {call}")
            if dead:
                self.lines.append(f"del {', '.join(dead)}")

    def _call(self, node: fx.Node, function: Any) -> str:
        if function is operator.getitem:
            source, index = node.args
            return f"{source}[{index}]"
        arguments = [self._literal(arg) for arg in node.args]
        arguments += [f"{key}={self._literal(arg)}" for key, arg in node.kwargs.items()]
        return f"{self._name(function)}({', '.join(arguments)})"

    def _literal(self, arg: Any) -> str:
        """An argument as source text; what has no literal is bound to a name."""
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, (list, tuple)):
            items = [self._literal(item) for item in arg]
            if isinstance(arg, list):
                return f"[{', '.join(items)}]"
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if arg is None or isinstance(arg, (bool, int, str)):
            return repr(arg)
        if isinstance(arg, float) and math.isfinite(arg):
            return repr(arg)
        return self._name(arg)

    def _name(self, value: Any) -> str:
        """A name in the function's globals for this value.

        No local is called so: operators have their namespace in front, all else ends in "__".
        """
        if isinstance(value, OpOverload):
            stem, end, value = re.sub(r"\W", "_", str(value)), "", value._op
        else:
            label = re.sub(r"\W", "_", getattr(value, "__name__", str(value)))
            stem, end = (label if label.isidentifier() else f"constant_{label}"), "__"
        for serial in itertools.count():
            name = f"{stem}_{serial}{end}" if serial else f"{stem}{end}"
            if name.isidentifier() and self.scope.setdefault(name, value) is value:
                return name
        raise AssertionError("unreachable")


def last_uses(nodes: Sequence[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, those that nobody needs after it; not those in `kept`."""
    seen = set(kept)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        dying[node] = [n for n in (node, *node.all_input_nodes) if n not in seen]
        seen.update(dying[node])
    return dying

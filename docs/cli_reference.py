"""Writes docs/reference/cli.md from the same definitions that `rekindle --help` prints.

    python docs/cli_reference.py

A test compares the committed page with what this prints, so run it after changing an option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from rekindle.cli import app, entry

PAGE = Path(__file__).parent / "reference" / "cli.md"

_HEAD = """\
# Command line

<!-- Written by docs/cli_reference.py from the options themselves. Do not edit. -->

{about}

`MODEL` is a model of the zoo (`rekindle models` lists them), a function in a file of yours
(`path/to/file.py:function`, which returns `(train_step, model, optimizer, batch)`), or, where the
command says so, a saved profile (`FILE.json.gz`).

Exit codes: `0` success, `1` a promise did not hold (bits differ, a budget was exceeded, a case
failed), `2` bad input, with one line on standard error that says what to change.
"""


def page() -> str:
    """The reference as Markdown."""
    commands = [
        (command.name or command.callback.__name__, command.callback)
        for command in app.registered_commands
        if command.callback is not None
    ]
    head = _HEAD.format(about=_description(entry))
    names = ["| command | what it does |", "|---|---|"]
    for name, function in commands:
        summary = _description(function).split("\n\n")[0]
        names.append(f"| [`rekindle {name}`](#rekindle-{name}) | {summary} |")
    sections = [_section(name, function) for name, function in commands]
    return "\n".join([head, *names, "", *sections])


def _description(function: Callable[..., Any]) -> str:
    """A docstring as paragraphs of one line each."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _section(name: str, function: Callable[..., Any]) -> str:
    rows = list(_rows(function))
    arguments = " ".join(row[0] for row in rows if not row[0].startswith("-"))
    usage = f"rekindle {name} {arguments} [OPTIONS]".replace("  ", " ")
    table = ["| name | value | meaning |", "|---|---|---|"]
    table += [f"| `{flag}` | {metavar} | {text} |" for flag, metavar, text in rows]
    lines = [f"## rekindle {name}", "", "```console", f"$ {usage}", "```", ""]
    return "\n".join([*lines, _description(function), "", *table, ""])


def _rows(function: Callable[..., Any]) -> Iterator[tuple[str, str, str]]:
    """The name, the value and the meaning of every argument and option."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        info: ParameterInfo = hints[name].__metadata__[0]
        text = (info.help or "").replace("|", "\\|")
        is_flag = hints[name].__origin__ is bool
        if isinstance(info, ArgumentInfo):
            yield info.metavar or name.upper(), "", text
        elif isinstance(info, OptionInfo):
            # In Annotated, typer keeps the first name in the place of the default.
            declared = [info.default, *(info.param_decls or ())]
            flag = next(each for each in declared if str(each).startswith("--"))
            choices = [] if is_flag else (info.metavar or "").split("|")
            metavar = ", ".join(f"`{choice}`" for choice in choices)
            yield flag, metavar, f"{text}{_default(parameter.default)}"


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return " Required."
    return "" if default is None or default is False else f" Default: `{default}`."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[2])}")

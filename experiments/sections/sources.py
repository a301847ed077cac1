"""The sources of the numbers: machine, versions, commits and commands."""

from __future__ import annotations

from typing import Any

from experiments.page import ABSENT, Page, paragraphs, table
from experiments.sections.peers import FILES
from experiments.tasks import Task
from rekindle.units import format_us

Found = dict[str, Any]


def section(page: Page) -> str:
    """One row per file, with its command."""
    rows = [_collected(name, content) for name, content in page.results.sources()]
    for name in FILES:
        content = page.results.benchmark(name)
        if content is not None:
            command = f"`python benchmarks/{name.removesuffix('_h200')}.py`"
            rows.append((command, *_machine(content), f"`{content['commit']}`", ABSENT))
    names = ("made by", "GPU", "Python", "torch", "commit", "duration")
    return paragraphs(table(names, rows), _failures(page))


def _collected(name: str, content: Found) -> tuple[str, ...]:
    commits = dict.fromkeys(row["commit"] for row in content["cases"])
    seconds = sum(row["seconds"] for row in content["cases"])
    command = f"`python -m experiments.collect --piece {name}`"
    written = ", ".join(f"`{commit}`" for commit in commits)
    return command, *_machine(content), written, format_us(seconds * 1e6)


def _machine(content: Found) -> tuple[str, ...]:
    versions = content["versions"]
    return content["gpu"] or "none, estimated", versions["python"], versions["torch"]


def _failure(row: Found) -> str:
    """The task, and the first line of its error."""
    message = row.get("message") or row["found"]["message"]
    words = Task(row["kind"], row["settings"], 0.0).words
    return f"{words}: {str(message).splitlines()[0]}"


def _failures(page: Page) -> str:
    lines = [f"- `{piece}`: {_failure(row)}" for piece, row in page.results.failures()]
    return "\n".join(["Failed, and missing above:", "", *lines]) if lines else ""

"""Shared by the sections of the document: figures, tables and display names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import Config
from experiments.results import Results
from rekindle.report.figures import DPI

ABSENT = "–"
_TITLES = {"resnet152": "ResNet-152", "bert-base": "BERT-base", "bert-large": "BERT-large"}


@dataclass(frozen=True)
class Page:
    """The input of a section, and where its figures go.

    `link` is the path of the figures' folder relative to the document.
    """

    config: Config
    results: Results
    figures: Path
    link: str

    def picture(self, name: str, about: str, figure: Any) -> str:
        """Save a figure; returns the Markdown that shows it."""
        self.figures.mkdir(parents=True, exist_ok=True)
        path = self.figures / f"{name}.png"
        figure.savefig(path, dpi=DPI, format="png", pil_kwargs={"optimize": True})
        return shown(about, f"{self.link}/{path.name}")


def shown(about: str, link: str) -> str:
    """The Markdown that shows a picture."""
    return f"![{about}]({link})"


def title_of(model: str, batch: int | None = None) -> str:
    """A model's display name.

    >>> title_of("resnet152", 128), title_of("mlp")
    ('ResNet-152 ×128', 'mlp')
    """
    name = _TITLES.get(model, model)
    return name if batch is None else f"{name} ×{batch:,}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [head, ["---"] * len(head), *rows]
    texts = ["| " + " | ".join(line) + " |" for line in lines]
    texts[1] = "|" + "---|" * len(head)
    return "\n".join(texts)


def paragraphs(*parts: str) -> str:
    """The non-empty parts of a section, separated by empty lines."""
    return "\n\n".join(part for part in parts if part)


def not_measured(*pieces: str, is_begun: bool = False) -> str:
    """The line that replaces results which were not collected, or the rest of them."""
    names = " ".join(pieces)
    what = "The rest is not measured yet" if is_begun else "Not measured yet"
    return f"*{what}: `python -m experiments.collect --piece {names}`.*"


def times(ratio: float, digits: int = 2) -> str:
    """A ratio with its sign.

    >>> times(1.0634), times(0.5)
    ('1.06×', '0.50×')
    """
    return f"{ratio:.{digits}f}×"

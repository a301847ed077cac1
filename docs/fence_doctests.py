"""Examples in docstrings as code blocks: a griffe extension that the API page is made with.

Markdown takes `>>> f()[0]` and its result for text and links; in a fence they are code.
"""

from __future__ import annotations

from typing import Any

import griffe


class FenceDoctests(griffe.Extension):
    """Puts the doctests of every docstring between fences."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring whose paragraphs that begin with `>>>` are fenced."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```pycon\n{each}\n```" if each.startswith(">>> ") else each for each in paragraphs
    )

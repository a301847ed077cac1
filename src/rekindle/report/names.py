"""Short forms of the names of modules, operators and source lines."""

from __future__ import annotations

import re
from pathlib import PurePath

from rekindle.core.graph.graph import Source

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern_of(module: str) -> str:
    """A module's path with * for its numbers, so that repeated blocks have the same one.

    >>> pattern_of("encoder.layer.11.output.dense"), pattern_of("conv1")
    ('encoder.layer.*.output.dense', 'conv1')
    """
    return _NUMBER.sub("*", module)


def source_line(source: Source, parts: int = 2) -> str:
    """The last parts of the file's path and the line; "" if unknown.

    >>> source_line(Source("conv1", "/home/me/torchvision/models/resnet.py", 268))
    'models/resnet.py:268'
    >>> source_line(Source("conv1", "/home/me/torchvision/models/resnet.py", 268), parts=1)
    'resnet.py:268'
    """
    if not source.filename:
        return ""
    return f"{'/'.join(PurePath(source.filename).parts[-parts:])}:{source.lineno}"


def shorten(text: str, width: int) -> str:
    """The text in at most `width` characters, cut in its first half: the end says most.

    >>> shorten("encoder.layer.11.attention.output.dense", 24)
    'encoder…ion.output.dense'
    >>> shorten("conv1", 24)
    'conv1'
    """
    if len(text) <= width:
        return text
    keep = max(width - 1, 2)
    head = keep // 3
    return f"{text[:head]}…{text[-(keep - head) :]}"


def shorten_path(path: str, width: int) -> str:
    """A module's path in at most `width` characters; its numbers and its end are kept.

    Components are reduced to their first letter, from the second on, before anything is cut.

    >>> shorten_path("bert.encoder.layer.11.attention.output.dense", 30)
    'bert.e.l.11.a.output.dense'
    >>> shorten_path("bert.encoder.layer.11.attention.output.dense", 20)
    'b.e.l.11.a.o.dense'
    """
    parts = path.split(".")
    for index in (*range(1, len(parts) - 1), 0):
        if len(".".join(parts)) <= width or len(parts) == 1:
            break
        if not parts[index].isdigit():
            parts[index] = parts[index][:1]
    return shorten(".".join(parts), width)

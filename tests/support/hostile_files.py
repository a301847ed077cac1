"""Hostile files, made from valid ones: damaged, foreign, and changed in every field."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e308, 1e-320),
    *("", "x", "[/red]", "[bold]x", "\x1b[31mred\x1b[0m\x07", "<script>alert(1)</script>", "&amp;"),
    *("\ud800", "\n\r\t\0", "../../etc/passwd", "$\\frac{1}", "a" * 20_000, "\u202eevil"),
    *([], {}, [[]], [0], [-1], [10**9], ["x"], {"x": 1}, [1, 2, 3], [None] * 50),
)
MARKUP = (
    *("[/red]", "[bold]x[/bold] [link=x]", "\x1b[31mred\x07", "<script>alert(1)</script>"),
    *("%s{}", ":smile:", "$x^2"),
)


def mutations(data: Any, seed: int, count: int) -> Iterator[Any]:
    """Copies of a JSON value with one to three changes each."""
    draw = random.Random(seed)
    text = json.dumps(data)
    for _ in range(count):
        changed = json.loads(text)
        for _ in range(draw.choice((1, 1, 2, 3))):
            _change(changed, draw)
        yield changed


def _change(data: Any, draw: random.Random) -> None:
    """Change something in a list or an object, anywhere inside."""
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        if not keys:
            if isinstance(data, list):
                data.append(deepcopy(draw.choice(NASTY)))
            return
        key = draw.choice(keys)
        if isinstance(data[key], (dict, list)) and draw.random() < 0.85:
            data = data[key]
            continue
        break
    change = draw.randrange(6)
    if change == 0:
        del data[key]
    elif change == 1 and isinstance(data, list):
        data.insert(key, deepcopy(draw.choice(NASTY)))
    elif change == 2 and isinstance(data, list):
        other = draw.choice(keys)
        data[key], data[other] = data[other], data[key]
    elif change == 3 and isinstance(data[key], int):
        data[key] += draw.choice((-1, 1, 1000, -1000))
    elif change == 4 and isinstance(data, dict):
        data[draw.choice(("schema", "x", "costs", "__class__"))] = deepcopy(draw.choice(NASTY))
    else:
        data[key] = deepcopy(draw.choice(NASTY))


def damaged(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """The bytes of a file, cut or overwritten in places; compressed or not."""
    draw = random.Random(seed)
    for _ in range(count):
        found = bytearray(content)
        if draw.random() < 0.4:
            found = found[: draw.randrange(len(found))]
        for _ in range(draw.choice((0, 1, 4, 50))):
            if found:
                found[draw.randrange(len(found))] = draw.randrange(256)
        yield gzip.compress(bytes(found)) if draw.random() < 0.3 else bytes(found)


def bombs() -> Iterator[tuple[str, bytes]]:
    """Files that take much memory or time if they are trusted."""
    yield "gzip", gzip.compress(b" " * (200 << 20))
    yield "gzip of gzip", gzip.compress(gzip.compress(b" " * (100 << 20)))
    yield "lists", b"[" * 1_000_000
    yield "closed lists", b"[" * 100_000 + b"]" * 100_000
    yield "objects", b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    yield "digits", b'{"schema": ' + b"9" * 1_000_000 + b"}"
    yield "exponent", b'{"schema": 1e999999}'
    yield "nan", b'{"schema": 1, "plan": NaN, "graph": Infinity, "profile": -Infinity, "about": {}}'
    yield "twice", b'{"schema": 1, "schema": 1}'
    yield "text", b'"' + b"a" * 1_000_000 + b'"'
    yield "utf-16", '{"schema": 1}'.encode("utf-16")
    yield "bytes", bytes(range(256)) * 100
    yield "empty", b""
    yield "number", b"1"
    yield "null", b"null"

"""JSON files: read with bounded memory, and written at once or not at all."""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import zlib
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20  # the largest measured profile, of BERT-large, has 0.7 MiB
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_SHOWN = 200


def read_json(path: Path) -> Any:
    """The content of a JSON file, which may be compressed.

    Raises OSError if it cannot be read, and ValueError if it is too large, damaged, nested too
    deeply, or ambiguous: NaN, Infinity and a name that an object has twice are refused.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is no file")  # and reading a pipe might never end
    with path.open("rb") as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if content.startswith(_GZIP_MAGIC):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as compressed:
                content = compressed.read(MAX_JSON_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"it cannot be decompressed: {error}") from None
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(
            content.decode(), object_pairs_hook=_object, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file so that an interrupted or concurrent write leaves no half file.

    The content goes to a new file of a unique name, which then replaces the old one; a link is
    replaced, and not followed.
    """
    if path.exists() and not path.is_file():  # a device, such as /dev/null
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def compressed(content: bytes) -> bytes:
    """The content in gzip's format; the same bytes each time."""
    return gzip.compress(content, mtime=0)


def in_one_line(problem: object) -> str:
    """A problem as one line of printable text, shortened: it may quote a file of someone else."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(problem))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"

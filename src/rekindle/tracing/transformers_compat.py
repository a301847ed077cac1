"""Keeps libraries on the way they take in a plain step.

transformers leaves attention masks out when their values allow it, and looks at those values
unless it meets a fake tensor: then it always masks, which may pick another attention kernel and
round differently. So it is told that nothing is fake; values that do not depend on data are known
anyway. Where it asks for one that does depend on data (a padding mask from the batch), the capture
starts again and lets it take its way for fake tensors, which is right for every mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.tracing.undo import replaced
from rekindle.tracing.user_line import Line

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "is_fake_tensor"


@contextmanager
def nothing_is_fake() -> Iterator[None]:
    """Tell transformers, if it is in use, that it meets no fake tensor."""
    module = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, _FUNCTION):
        yield
        return
    with replaced(module, _FUNCTION, lambda tensor: False):
        yield


def asks_for_values(line: Line) -> bool:
    """Whether a line belongs to a library that can do without values where tensors are fake."""
    module = sys.modules.get(_MODULE)
    if module is None or module.__file__ is None:
        return False
    return line.filename.startswith(str(Path(module.__file__).parents[1]))

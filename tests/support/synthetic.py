"""The deep steps that the benchmarks plan. Import with `from plan.synthetic import deep_resnet`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).parents[2] / "benchmarks" / "synthetic.py"
_SPEC = importlib.util.spec_from_file_location("benchmarks_synthetic", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = sys.modules["benchmarks_synthetic"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

deep_chain = _MODULE.deep_chain
deep_resnet = _MODULE.deep_resnet

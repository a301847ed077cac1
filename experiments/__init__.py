"""Experiments on whole models: results collected on a GPU, and the document made from them.

    python -m experiments.collect --list                      # the pieces, and how long each takes
    python -m experiments.collect --piece NAME --out FOLDER   # measure one piece
    python -m experiments.document                            # write docs/results/experiments.md

Collecting writes JSON. The document and its figures are made only from that JSON and the results of
the benchmarks.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
RESULTS = ROOT / "experiments" / "results"
"""The collected results."""

if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))  # where the package is not installed

"""Experiments on whole models: what is collected on a GPU, and the document made from it.

    python -m experiments.collect --list                      # what there is, and how long it takes
    python -m experiments.collect --piece NAME --out FOLDER   # measure one piece
    python -m experiments.document                            # write docs/results/experiments.md

Collecting writes JSON; the document and its figures are made from that JSON and from the results
of the benchmarks, and from nothing else.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository."""
RESULTS = ROOT / "experiments" / "results"
"""What was collected."""

if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))  # where the package is not installed

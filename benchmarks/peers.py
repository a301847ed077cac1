"""Other techniques that save memory, from the package."""

from __future__ import annotations

import sys

from common import ROOT

sys.path.insert(0, str(ROOT / "src"))

from rekindle.studies.peers import BLOCKS, checkpoint_every_block

__all__ = ["BLOCKS", "checkpoint_every_block"]

"""Every test starts with nothing compiled."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()

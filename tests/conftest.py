"""Every test starts from the same seed, on one thread, offline, with an empty cache of its own.

GPU tests wait for a GPU.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Read by the hub client when it is imported, so set before anything can import it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

GPU_TESTS = Path(__file__).parent / "gpu"


# Generated examples are the same in every run; `make fuzz` looks for others.
settings.register_profile("same", derandomize=True)
settings.register_profile("fuzz", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_configure() -> None:
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp(prefix="rekindle-tests-")  # where profiles are kept
    os.environ["XDG_CACHE_HOME"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in tests/gpu, and skip what is marked where there is no GPU."""
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def _own_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test uses what another has measured."""
    monkeypatch.setattr("rekindle.measuring.measure._recent", {})


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)

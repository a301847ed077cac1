"""Shared by all benchmarks: the environment of a result, and how it is written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torchvision", "timm", "transformers", "numpy", "triton")


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit a result belongs to."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    on_cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "cpu": {"machine": platform.machine(), "threads": torch.get_num_threads()},
        "versions": versions,
        "commit": os.environ.get("COMMIT") or _commit(),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: Path, benchmark: str, cases: list[dict[str, Any]]) -> None:
    """Write a result as JSON."""
    result = {"schema": 1, "benchmark": benchmark, **environment(), "cases": cases}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")

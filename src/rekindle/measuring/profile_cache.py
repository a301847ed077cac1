"""Keeps measured profiles on disk, by graph, device and versions.

A profile that cannot be read is as good as none: it is measured anew and written over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.serial import load_profile, save_profile
from rekindle.errors import ProfileError

log = logging.getLogger("rekindle")


def folder() -> Path:
    """Where profiles are kept: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rekindle" / "profiles"


def path_for(graph: StepGraph, device: str, versions: Mapping[str, str]) -> Path:
    """The file for one graph on one device under these versions."""
    key = json.dumps([graph.fingerprint, device, sorted(versions.items())])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return folder() / f"{graph.fingerprint}-{digest}.json.gz"


def load(graph: StepGraph, device: str, versions: Mapping[str, str]) -> Profile | None:
    """A kept profile, unless there is none or it does not fit."""
    path = path_for(graph, device, versions)
    try:
        if not path.exists():
            return None
        profile = load_profile(path).profile
    except (ProfileError, OSError) as error:
        log.warning("ignoring a kept profile: %s", error)
        return None
    if profile.fingerprint != graph.fingerprint:
        log.warning("ignoring %s: it is of another graph", path)
    elif profile.device != device or dict(profile.versions) != dict(versions):
        log.warning("ignoring %s: it is of another device or version", path)
    else:
        return profile
    return None


def save(graph: StepGraph, profile: Profile) -> None:
    """Keep a profile; a folder that cannot be written to is no reason to fail."""
    path = path_for(graph, profile.device, profile.versions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_profile(path, graph, profile, {})
    except OSError as error:
        log.warning("could not keep the profile: %s", error)

"""The peak of a step on a GPU, told beside the forecast."""

from __future__ import annotations

import logging

import pytest
import torch

from rekindle.core.schedule import Plan
from rekindle.dynamo.watch import Watch


def plan(peak_bytes: int, budget_bytes: int) -> Plan:
    return Plan(
        fingerprint="",
        planner="none",
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        recompute_us=0.0,
        bound_us=0.0,
        schedule=(),
        decisions=(),
    )


def test_the_second_step_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: calls.append("read") or 7
    )
    watch = Watch()
    for _ in range(5):
        watch.begin(torch.device("cuda"), [])
    assert calls == ["reset", "read"]
    assert watch.peak_bytes == 7


def test_nothing_is_watched_on_a_cpu() -> None:
    watch = Watch()
    for _ in range(5):
        watch.begin(torch.device("cpu"), [])
    assert watch.peak_bytes is None


@pytest.mark.parametrize(("peak_bytes", "level"), [(90, logging.INFO), (110, logging.WARNING)])
def test_too_much_is_a_warning(
    caplog: pytest.LogCaptureFixture, peak_bytes: int, level: int
) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle"):
        Watch().compare(peak_bytes, [plan(80, 100)])
    assert [record.levelno for record in caplog.records] == [level]
    assert "forecast" in caplog.text

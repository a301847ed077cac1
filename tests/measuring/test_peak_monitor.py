"""A step's peak is read from the allocator, and reported with its forecast and budget."""

from __future__ import annotations

import logging

import pytest
import torch

from rekindle.measuring.timing import PeakMonitor, report_peak


def test_the_peak_between_start_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: calls.append("read") or 7
    )
    monitor = PeakMonitor(torch.device("cuda"))
    assert monitor.is_active
    monitor.start()
    assert monitor.stop() == 7
    assert calls == ["reset", "read"]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_other_devices_are_not_monitored(device: torch.device | None) -> None:
    monitor = PeakMonitor(device)
    monitor.start()
    assert not monitor.is_active
    assert monitor.stop() is None


@pytest.mark.parametrize(("peak_bytes", "level"), [(90, logging.INFO), (110, logging.WARNING)])
def test_an_overshoot_is_a_warning(
    caplog: pytest.LogCaptureFixture, peak_bytes: int, level: int
) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle"):
        assert report_peak(peak_bytes, 80, 100) is (peak_bytes > 100)
    assert [record.levelno for record in caplog.records] == [level]
    assert "forecast" in caplog.text

"""The peak of a step on a GPU, told beside the forecast."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from dynamo.small import batch_for, perceptron, step

from rekindle import dynamo
from rekindle.core.schedule import Plan
from rekindle.dynamo import session
from rekindle.dynamo.watch import Watch
from rekindle.errors import InfeasibleBudget


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
        found = Watch().compare(peak_bytes, [plan(80, 100)])
    assert found == (30 if level == logging.WARNING else 0)
    assert [record.levelno for record in caplog.records] == [level]
    assert "forecast" in caplog.text


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By how much the second step will seem to be over the forecast, on a GPU that is not there."""
    found = {"bytes": 0}

    def begin(self: Watch, device: torch.device, plans: list[Plan]) -> int:
        self._n_steps += 1
        return found["bytes"] if self._n_steps == 3 else 0

    monkeypatch.setattr(Watch, "begin", begin)
    return found


def trained(over_bytes: int, over: dict[str, int], **how: Any) -> tuple[Any, list[Any], list[Any]]:
    """A few steps; the plans' peaks and all gradients after each."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, batch = perceptron(), batch_for(perceptron)
    compiled = dynamo.compile(model, lower="eager", **how)
    over["bytes"] = over_bytes
    peaks, found = [], []
    for _ in range(7):
        found.append(step(compiled, batch))
        peaks.append([each.plan.peak_bytes for each in compiled.plans])
    return compiled, peaks, found


def test_a_step_that_took_too_much_is_planned_once_more(over: dict[str, int]) -> None:
    _, plain, expected = trained(0, over, budget="80%")
    assert plain == plain[:1] * 7
    over_bytes = plain[0][0] // 20
    compiled, peaks, found = trained(over_bytes, over, budget="80%")
    assert peaks[:2] == plain[:2]
    assert peaks[2:] == peaks[2:3] * 5  # once only, although it is still over in the fifth step
    assert peaks[2][0] < plain[0][0]
    (only,) = compiled.plans
    assert only.plan.peak_bytes <= only.plan.budget_bytes - over_bytes
    for had, has in zip(expected, found, strict=True):
        assert all(torch.equal(had[name], has[name]) for name in had)


def test_it_is_left_alone_where_that_does_not_help(
    over: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain, _ = trained(0, over, budget="80%")
    assert trained(plain[0][0] // 2, over, budget="80%")[1] == plain  # somebody else's memory
    monkeypatch.setattr(session, "_is_distributed", lambda: True)
    assert trained(plain[0][0] // 20, over, budget="80%")[1] == plain


def test_more_than_can_be_spared_is_not_asked_for(over: dict[str, int]) -> None:
    """Where no plan has so much room, the one with the least peak is taken."""
    torch.compiler.reset()
    with pytest.raises(InfeasibleBudget) as raised:
        step(dynamo.compile(perceptron(), budget=1, lower="eager"), batch_for(perceptron))
    least = raised.value.least_peak_bytes
    compiled, peaks, _ = trained(least // 20, over, budget=least + least // 100)
    assert least <= peaks[0][0] <= least + least // 100
    assert peaks[2] == [least]
    assert compiled.session.spare_bytes > 0

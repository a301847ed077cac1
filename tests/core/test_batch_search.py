"""The search for the largest batch, against trying every one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.cost.batch_search import (
    Between,
    Fit,
    climb,
    close_in,
    descend,
    largest_within,
    quickest,
)

CLOSE = 0.02


@given(fixed=st.integers(0, 500), each=st.integers(1, 50), budget=st.integers(1, 100_000))
def test_the_largest_within_a_budget(fixed: int, each: int, budget: int) -> None:
    def peak_bytes(batch: int) -> int:
        return fixed + each * batch + (batch % 7)  # nearly even

    tried: list[int] = []
    found = largest_within(
        lambda n: tried.append(n) or peak_bytes(n), budget, start=16, close=CLOSE
    )
    brute = max((n for n in range(1, budget + 1) if peak_bytes(n) <= budget), default=0)
    assert found <= brute
    assert brute - found <= max(1, CLOSE * brute)
    assert found == 0 or peak_bytes(found) <= budget
    assert len(tried) <= 40


@given(largest=st.integers(1, 5000), told=st.floats(0.2, 5.0), width=st.floats(1.0, 1.2))
def test_closing_in_from_a_wrong_place(largest: int, told: float, width: float) -> None:
    """Both ends of the interval may be wrong; the batch that is returned has a plan."""
    planned: list[int] = []

    def plan(batch: int) -> Fit | None:
        planned.append(batch)
        return Fit(batch, batch, 1.0) if batch <= largest else None

    thought = Between(told * largest, told * largest * width)
    found = close_in(plan, thought, CLOSE)
    assert found is not None
    assert found.batch in planned
    assert found.batch <= largest
    if thought.fits <= largest < thought.fails:
        assert largest - found.batch <= max(1, CLOSE * largest)


def test_nothing_can_be_planned() -> None:
    assert close_in(lambda batch: None, Between(10.0, 12.0), CLOSE) is None


def test_climbing() -> None:
    start = Fit(100, 0, 1.0)
    assert climb(lambda n: Fit(n, 0, 1.0) if n <= 130 else None, start, 400, CLOSE).batch == 130
    assert climb(lambda n: None, start, 400, CLOSE) is start


@pytest.mark.parametrize("reaches", [1.0, 1.004, 1.02, 1.3, 2.0])
def test_coming_down_on_what_can_be_planned(reaches: float) -> None:
    """Planners get somewhat further than the least peak that they know of."""
    found = descend(lambda batch: batch <= 100 * reaches, 100.0)
    assert found.fits <= 100 * reaches < found.fails
    assert found.fails / found.fits <= 1.02


@given(steepness=st.floats(0.05, 3.0), at_least=st.floats(0.5, 0.99), largest=st.integers(20, 4000))
def test_the_quickest(steepness: float, at_least: float, largest: int) -> None:
    """Time grows with what has to be computed again."""
    plain = Fit(10, 1, 10.0)

    def plan(batch: int) -> Fit | None:
        if batch > largest:
            return None
        return Fit(batch, 1, batch * (1 + steepness * (1 - plain.batch / batch)))

    found, beyond = quickest(plan, plain, at_least, Between(20.0, largest + 1), CLOSE)
    fits = [
        n for n in range(11, largest + 1) if (p := plan(n)) and p.samples_per_s >= at_least * 1e6
    ]
    brute = max(fits, default=plain.batch)
    assert found.batch <= brute < beyond
    assert brute - found.batch <= max(1, CLOSE * brute)

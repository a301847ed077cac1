"""Random training programs train to the same bits as without Rekindle, or are refused."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fuzz.cell import Training, kind_of, run
from benchmarks.fuzz.programs import N_STEPS, forget, load, source

# Quick ones: those with the default planner (see PLANNERS) take seconds.
QUICK = [seed for seed in range(43) if seed % 16 != 15]
SLOW = [15, 31, *range(43, 83)]
GOOD = ("equal", "refused", "unstable")


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_a_random_program(seed: int) -> None:
    cells = run(seed)
    if "invalid" not in cells:  # it fails without Rekindle, too
        bad = {budget: cell for budget, cell in cells.items() if cell["outcome"] not in GOOD}
        assert not bad, f"python -m benchmarks.fuzz --seed {seed}"


@pytest.mark.slow
def test_most_programs_are_valid_and_accepted() -> None:
    outcomes = [run(seed, ("none",)) for seed in range(100, 130)]
    valid = [cells["none"]["outcome"] for cells in outcomes if "none" in cells]
    assert len(valid) >= 20
    assert valid.count("equal") >= 15


def test_a_seed_is_one_program() -> None:
    assert source(5) == source(5)
    assert len({source(seed) for seed in range(50)}) == 50


def test_a_step_with_other_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees one bit of one parameter, and an error that the plain step raises."""
    from rekindle.engines.program import Program

    finish = Program._finish

    def changed(self: Program, tensors: object, state: list[torch.Tensor]) -> object:
        result = finish(self, tensors, state)  # type: ignore[arg-type]
        with torch.no_grad():
            state[0].view(-1)[:1] += 1e-3
        return result

    monkeypatch.setattr(Program, "_finish", changed)
    assert run(0, ("none",))["none"]["outcome"] == "wrong"


def test_the_parts_of_a_program() -> None:
    model, optimizer, train_step, batch_of, change, look = load(0, source(0))()
    for i in range(N_STEPS):
        train_step(model, optimizer, batch_of(i))
        change(i)
    training = Training()
    training.note("look", look())
    assert not training.differences(training)
    forget(0)


def test_reasons_without_what_differs() -> None:
    cell = {"reason": "CaptureError: program_7.py:12: the step changes requires_grad of l3.weight"}
    assert kind_of(cell) == "CaptureError: the step changes requires_grad of NAME.weight"

"""Recomputed random calls on the CPU: the same numbers again, without torch's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rekindle.measuring.meters import peak_bytes
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators, rng

aten = torch.ops.aten


def overloads() -> list[OpOverload]:
    """Every operator of torch that draws random numbers, except those that write to `out`."""
    packets = [getattr(aten, name) for name in dir(aten)]
    found = [
        getattr(packet, name)
        for packet in packets
        if hasattr(packet, "overloads")
        for name in packet.overloads()
    ]
    seeded = [op for op in found if torch.Tag.nondeterministic_seeded in op.tags]
    return [op for op in seeded if not any(a.is_out for a in op._schema.arguments)]


def calls(op: OpOverload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that suit most operators, by name and type, for the default generator."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    skips = False  # an argument was left out
    for argument in op._schema.arguments:
        kind = str(argument.type)
        known = {
            "size": [4, 5],
            "names": None,
            "n": 9,
            "high": 7 if kind != "Tensor" else torch.tensor(7),
            "low": 2,
            "p": 0.4 if kind != "Tensor" else torch.full((4, 5), 0.4),
            "num_samples": 2,
            "noise": torch.zeros(4, 5),
            "training": True,
        }
        if argument.name == "generator":
            if not argument.has_default_value():
                kwargs["generator"] = None
            continue
        if argument.name in known:
            value = known[argument.name]
        elif kind == "Tensor":
            value = torch.rand(4, 5)
        elif argument.has_default_value():
            skips = True
            continue
        else:
            value = {"float": 0.5, "number": 0.5, "bool": True}.get(kind)
        if argument.kwarg_only or skips:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


REDRAWN = [op for op in overloads() if rng.redrawn("cpu", op) is not None]
FOREIGN = ("names", "_fused_dropout")  # deprecated; of CUDA


@pytest.mark.parametrize("op", REDRAWN, ids=str)
def test_redrawn_calls_have_the_same_numbers_and_leave_the_generator(op: OpOverload) -> None:
    if any(word in str(op) for word in FOREIGN):
        pytest.skip("not for the CPU")
    torch.manual_seed(3)
    torch.randn(3)  # the generator has a normal number in store
    args, kwargs = calls(op)
    state = rng.read("cpu")
    expected = op(*copied(args), **kwargs)
    now = torch.get_rng_state()
    seeded = rng.redrawn("cpu", op)
    assert seeded is not None
    rest, named = operators.without_generator(seeded, args, kwargs)
    for _ in range(2):
        found = rng.redraw(state, seeded, *copied(rest), **named)
        for a, b in zip(tensors(found), tensors(expected), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), now)


def test_most_operators_are_redrawn() -> None:
    names = {op._schema.name.removeprefix("aten::") for op in REDRAWN}
    assert names >= {"rand", "randn", "rand_like", "randn_like", "randint", "randint_like"}
    assert names >= {"bernoulli", "bernoulli_", "rrelu_with_noise", "multinomial", "poisson"}
    assert rng.redrawn("cpu", aten.native_dropout.default) is None


def test_a_generator_in_the_middle_of_the_arguments_is_replaced() -> None:
    own, op = torch.Generator().manual_seed(4), aten.rrelu_with_noise.default
    x, noise = torch.randn(50), torch.zeros(50)
    state = rng.read(own)
    expected = op(x, noise, 0.1, 0.3, True, own)
    args, kwargs = operators.without_generator(op, (x, noise, 0.1, 0.3, True, own), {})
    assert (len(args), kwargs) == (5, {})
    assert torch.equal(rng.redraw(state, op, *args, **kwargs), expected)


@pytest.mark.parametrize("own", [False, True])
def test_reading_and_redrawing_take_no_memory(own: bool) -> None:
    source = torch.Generator() if own else "cpu"
    out, states = torch.zeros(10), [rng.read(source)]

    def step() -> None:
        states.append(rng.read(source))
        rng.redraw(states[0], aten.bernoulli_.float, out, 0.5)

    assert peak_bytes(step, torch.device("cpu"), list) == 0


def test_replayed_calls_have_the_same_numbers_and_leave_the_generator() -> None:
    x = torch.ones(100)
    state = rng.read("cpu")
    expected = aten.native_dropout.default(x, 0.5, True)
    now = torch.get_rng_state()
    found: list[Any] = []

    def step() -> None:
        found.append(rng.replay("cpu", state, aten.native_dropout.default, x, 0.5, True))

    bytes_of_results = sum(each.nbytes for each in expected)
    workspace = peak_bytes(lambda: aten.native_dropout.default(x, 0.5, True), x.device, list)
    torch.set_rng_state(now)
    peak = peak_bytes(step, torch.device("cpu"), list)
    assert peak <= max(workspace, bytes_of_results + now.nbytes)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected, strict=True))
    assert torch.equal(torch.get_rng_state(), now)

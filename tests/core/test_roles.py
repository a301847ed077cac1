"""Roles of storages, from graphs written by hand."""

from __future__ import annotations

from rekindle.core.graph.graph import Op, Phase, Role, Value, assign_roles


def value(index: int, storage: int) -> Value:
    return Value(index, f"v{index}", storage, (1,), "float32")


def op(index: int, phase: Phase, inputs: list[int], outputs: list[int], *mutates: int) -> Op:
    return Op(index, f"op{index}", "t", phase, tuple(inputs), tuple(outputs), mutates)


def roles(n: int, ops: list[Op], **known: object) -> list[Role]:
    settings = {"known": {}, "grads": set(), "outputs": set(), **known}
    return assign_roles(n, ops, [value(i, i) for i in range(n)], **settings)  # type: ignore[arg-type]


def test_by_who_makes_and_who_reads() -> None:
    """0 enters; 1 is read in the backward pass, 2 is not; 3 and 4 come from the backward pass."""
    ops = [
        op(0, Phase.FORWARD, [0], [1]),
        op(1, Phase.LOSS, [1], [2]),
        op(2, Phase.BACKWARD, [1], [3]),
        op(3, Phase.BACKWARD, [3], [4]),
        op(4, Phase.OPTIMIZER, [4], [5]),
    ]
    assert roles(6, ops, known={0: Role.PARAM}, grads={4}) == [
        Role.PARAM,
        Role.ACTIVATION,
        Role.TEMP,
        Role.GRAD_MAP,
        Role.GRAD,
        Role.TEMP,
    ]


def test_what_the_loss_makes_for_the_backward_pass_is_an_activation() -> None:
    ops = [op(0, Phase.LOSS, [], [0]), op(1, Phase.BACKWARD, [0], [1])]
    assert roles(2, ops) == [Role.ACTIVATION, Role.GRAD_MAP]


def test_what_is_known_comes_first() -> None:
    """A parameter that is returned, or read in the backward pass, stays a parameter."""
    ops = [op(0, Phase.FORWARD, [], [0]), op(1, Phase.BACKWARD, [0], [1])]
    assert roles(2, ops, known={0: Role.BUFFER}, grads={0, 1}, outputs={0, 1}) == [
        Role.BUFFER,
        Role.GRAD,
    ]


def test_an_output_is_not_an_activation() -> None:
    """It is alive at the end under every plan, so dropping it gains nothing."""
    ops = [op(0, Phase.FORWARD, [], [0]), op(1, Phase.BACKWARD, [0], [1])]
    assert roles(2, ops, outputs={0}) == [Role.OUTPUT, Role.GRAD_MAP]


def test_a_view_counts_for_its_storage() -> None:
    values = [value(0, 0), value(1, 0), value(2, 1)]
    ops = [
        op(0, Phase.FORWARD, [], [0]),
        op(1, Phase.FORWARD, [0], [1]),
        op(2, Phase.BACKWARD, [1], [2]),
    ]
    found = assign_roles(2, ops, values, known={}, grads=(), outputs=())
    assert found == [Role.ACTIVATION, Role.GRAD_MAP]


def test_the_first_writer_decides_the_phase() -> None:
    """A buffer made in the forward pass and filled again later is still the forward pass's."""
    ops = [op(0, Phase.FORWARD, [], [0]), op(1, Phase.BACKWARD, [0], [], 0)]
    assert roles(1, ops) == [Role.ACTIVATION]


def test_a_storage_nobody_touches() -> None:
    assert roles(1, []) == [Role.TEMP]


def test_resident_roles() -> None:
    resident = {role for role in Role if role.is_resident}
    assert resident == {Role.PARAM, Role.BUFFER, Role.OPT_STATE, Role.INPUT}

"""Batches and results survive a round trip, and keys distinguish them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import rekindle
from rekindle.tracing import batch_tree

Pair = namedtuple("Pair", "first second")


@dataclass
class Sample:
    x: Any
    note: str = "none"
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Frozen:
    x: Any

    def __post_init__(self) -> None:
        assert self.x is not None


def test_rebuild_puts_new_tensors_in_order() -> None:
    old = {"a": [torch.zeros(1), 5], "b": (torch.zeros(2), {"c": torch.zeros(3)}), "d": None}
    flat = batch_tree.flatten(old)
    assert [len(tensor) for tensor in flat.tensors] == [1, 2, 3]
    new = [torch.ones(n) for n in (1, 2, 3)]
    rebuilt = flat.structure.rebuild(new)
    assert rebuilt == {"a": [new[0], 5], "b": (new[1], {"c": new[2]}), "d": None}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: [x, (x, [x])],
        lambda x: Pair(x, second=1),
        lambda x: OrderedDict(b=x, a=2),
        lambda x: UserDict(x=x, y=[x]),
        lambda x: Sample(x, "kept", {"y": x}),
        lambda x: Frozen(x),
        lambda x: [Sample(Frozen(UserDict(x=x)))],
        lambda x: (),
        lambda x: None,
    ],
)
def test_round_trip(make: Any) -> None:
    """Types, order and constants survive; tensors are the same objects."""
    x = torch.ones(2)
    flat = batch_tree.flatten(make(x))
    rebuilt = flat.structure.rebuild(flat.tensors)
    expected = make(x)
    assert type(rebuilt) is type(expected)
    assert repr(rebuilt) == repr(expected)
    assert all(tensor is x for tensor in flat.tensors)
    assert batch_tree.flatten(rebuilt).structure.key() == flat.structure.key()


def key(value: Any) -> Any:
    found = batch_tree.flatten(value).structure.key()
    hash(found)
    return found


def test_keys_do_not_depend_on_tensors() -> None:
    assert key({"x": torch.zeros(1), "n": 1}) == key({"x": torch.ones(9), "n": 1})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0.0, False),
        ("1", 1),
        (None, 0),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": torch.ones(1)}),
        (UserDict(a=1), {"a": 1}),
        (UserDict(a=1), UserDict(a=True)),
        (Sample(1, "x"), Sample(1, "y")),
        (Sample(1), Sample(1.0)),
        (Pair(1, 2), (1, 2)),
        (torch.float32, torch.float64),
        (0.0, -0.0),
    ],
)
def test_keys_differ(one: Any, other: Any) -> None:
    """Two batches that the step might treat differently must not share a capture."""
    assert key([one]) != key([other])


def test_a_nan_in_the_batch_has_one_key() -> None:
    """Otherwise every step with a NaN constant would be captured again."""
    assert key([float("nan")]) == key([float("nan")])


def test_opaque_leaves() -> None:
    class Opaque:
        pass

    one, two = Opaque(), Opaque()
    constants = [1, 1.0, 1j, "s", b"b", None, True, torch.float32, torch.device("cpu")]
    structure = batch_tree.flatten([torch.ones(1), constants, one, {"x": Sample(two)}]).structure
    assert batch_tree.opaque_leaves(structure) == [one, two]
    assert batch_tree.opaque_leaves(batch_tree.flatten(constants).structure) == []


class Named(dict):  # type: ignore[type-arg]
    """A dict with attributes of its own."""


@dataclasses.dataclass
class Labelled:
    x: torch.Tensor


def test_attributes_of_dicts_and_dataclasses_come_back() -> None:
    batch, other = Named(x=torch.ones(2)), Labelled(torch.ones(2))
    batch.scale, batch.weights = 3.0, torch.zeros(1)  # type: ignore[attr-defined]
    other.scale = 2.0  # type: ignore[attr-defined]
    for tree, scale in ((batch, 3.0), (other, 2.0)):
        flat = batch_tree.flatten(tree)
        rebuilt = flat.structure.rebuild(flat.tensors)
        assert type(rebuilt) is type(tree)
        assert rebuilt.scale == scale
        key = flat.structure.key()
        tree.scale = 4.0  # type: ignore[union-attr]
        assert batch_tree.flatten(tree).structure.key() != key
    assert torch.equal(batch_tree.flatten(batch).tensors[1], torch.zeros(1))


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (torch.ones(2, 4).as_subclass(type("Own", (torch.Tensor,), {})), "a Own, a subclass"),
        (torch.ones(2, 4, dtype=torch.complex64).conj(), "conjugated or negated"),
        (Named(x=torch.ones(2, 4)), "object, which"),
    ],
)
def test_batches_that_cannot_be_carried_are_refused(batch: Any, problem: str) -> None:
    if isinstance(batch, Named):
        batch.helper = object()  # type: ignore[attr-defined]
    model = torch.nn.Linear(4, 2)

    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        raise AssertionError("the batch is checked first")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(rekindle.CaptureError, match=problem):
        rekindle.optimize(train_step, model, optimizer, batch)


@dataclass
class Guarded:
    """Answers `getattr` with errors of its own, as configurations with settings by layer do."""

    x: Any
    kept: str = "kept"
    late: Any = field(init=False)

    def __getattribute__(self, name: str) -> Any:
        if name in ("x", "kept", "late", "__dict__"):
            raise KeyError(f"{name} may vary")
        return super().__getattribute__(name)


def test_fields_are_read_without_code_of_their_class() -> None:
    flat = batch_tree.flatten(Guarded(torch.zeros(1)))
    new = torch.ones(1)
    rebuilt = flat.structure.rebuild([new])
    assert object.__getattribute__(rebuilt, "__dict__") == {"x": new, "kept": "kept"}
    assert flat.structure.key() != batch_tree.flatten(Guarded(new, "other")).structure.key()

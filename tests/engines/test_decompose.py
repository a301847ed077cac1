"""Steps in the forms that a compiler gets compute what they compute plainly, but for rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.random_modules import CHANNELS, SIDE, WIDTH, bodies
from support.uncompiled import (
    Form,
    Parts,
    assert_close,
    decomposed,
    grouped,
    grouped_for_gpu,
    recorded,
    train,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rekindle.engines.inductor import decompositions
from rekindle.engines.inductor.decompose import decompose
from rekindle.measuring.bitwise_compare import State
from rekindle.passes.matmul_padding import PaddingOptions

aten = torch.ops.aten
FORMS = [decomposed, grouped, grouped_for_gpu]
PAD_ALL = PaddingOptions(min_flops=1)
padded_for_gpu = partial(grouped_for_gpu, padding=PAD_ALL)


def square(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    inputs, labels = batch
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Two batches."""
    g = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=g).to(dtype) for _ in range(2)]


def trains_the_same(make: Callable[[], Parts], form: Form, steps: int = 3, **how: float) -> State:
    torch.manual_seed(0)
    expected = train(make(), None, steps)
    torch.manual_seed(0)
    found = train(make(), form, steps)
    assert_close(found, expected, **how)
    return found


class Function(nn.Module):
    """A function of the input and two square weights."""

    def __init__(self, function: Callable[..., Tensor], width: int = 4) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Parameter(torch.randn(width, width))
        self.second = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.first, self.second)


def function_parts(function: Callable[..., Tensor], *shape: int) -> Parts:
    model = Function(function).double()
    return square, model, momentum(model), numbers(*(shape or (6, 4)))


# Usual models


class Residual(nn.Module):
    """Convolutions with batch norms, written over as far as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(8, affine=False)
        self.narrow = nn.Conv2d(8, 4, 1)
        self.third_norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first_norm(self.first(x)), inplace=True), 2)
        y = self.second_norm(self.second(x))
        y += x
        y = F.relu(y, inplace=True)
        y = self.third_norm(self.narrow(y))
        return self.head(F.avg_pool2d(y, 2).mean((2, 3)))


class Tied(nn.Module):
    """An embedding that is the output layer, too, and a hidden state in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in self.embedding(x).unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return self.norm(state[0]) @ self.embedding.weight.t()


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Dropout(0.0),
        nn.GELU(),
        nn.LayerNorm(16),
        nn.Linear(16, 8, bias=False),
        nn.Hardswish(inplace=True),
        nn.Linear(8, 3),
    )


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))


def groups() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.GroupNorm(2, 4),
        nn.SiLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.InstanceNorm2d(4),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (layers, (6, 8)),
    "attention": (attention, (4, 5, 8)),
    "convolutions": (Residual, (4, 3, 8, 8)),
    "group norm": (groups, (4, 3, 8, 8)),
    "tied": (Tied, (4, 3)),
}


def model_parts(name: str, dtype: torch.dtype = torch.float64) -> Parts:
    build, shape = MODELS[name]
    model = build().to(dtype)
    g = torch.Generator().manual_seed(3)
    labels = [torch.randint(0, 3, shape[:1], generator=g) for _ in range(2)]
    inputs = numbers(*shape, dtype=dtype)
    if name == "tied":
        inputs = [torch.randint(0, 11, shape, generator=g) for _ in range(2)]
    return classify, model, momentum(model), list(zip(inputs, labels, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_usual_models(name: str, form: Form) -> None:
    trains_the_same(lambda: model_parts(name), form)


@pytest.mark.parametrize(
    ("name", "training"), [*((name, True) for name in MODELS), ("convolutions", False)]
)
def test_short_numbers(name: str, training: bool) -> None:
    """As autocast has them, results in types that operators have and compilers do not."""

    def make() -> Parts:
        step, *rest = model_parts(name, torch.float32)
        rest[0].train(training)

        def short(*args: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return step(*args)

        return short, *rest

    trains_the_same(make, grouped, steps=1, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_eval_mode(form: Form) -> None:
    """Batch norms then read statistics; dropout does nothing."""

    def make() -> Parts:
        step, model, *rest = model_parts("convolutions")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                module.running_mean.normal_()
        return step, model.eval(), *rest

    trains_the_same(make, form)


def test_batch_norms_find_statistics_once() -> None:
    recording = recorded(model_parts("convolutions"))
    names = [call.node.target.__name__ for call in decomposed(recording).tape.calls]
    assert names.count("batch_statistics") == names.count("normalized") == 3
    assert not any("native_batch_norm" in name for name in names)


def test_convolutions_have_channels_last_on_a_gpu_and_nobody_else_sees() -> None:
    """Strides of gradients and results are compared by `assert_close`; these are inside."""
    recording = decompose(recorded(model_parts("convolutions")), for_gpu=True)
    metas = recording.tape.metas
    convolved = [c for c in recording.tape.calls if c.node.target is aten.convolution.default]
    assert len(convolved) == 3
    for call in convolved:
        (result,) = call.results
        _, channels, *_ = metas[result].shape
        assert metas[result].stride[-1] == channels
        assert metas[result].stride[1] == 1
    copies = [c for c in recording.tape.calls if c.node.target is aten.clone.default]
    inside = [c for c in copies if not c.in_backward]
    assert len(inside) <= 4  # the batch and three weights; pooling takes any order, and so do norms


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies, form=st.sampled_from([grouped, grouped_for_gpu]))
def test_random_modules(body: tuple[nn.Module, tuple[int, ...]], form: Form) -> None:
    module, shape = body
    features = WIDTH if len(shape) == 2 else CHANNELS * SIDE * SIDE
    model = nn.Sequential(module, nn.Linear(features, 3)).double()
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    labels = torch.randint(0, 3, shape[:1])
    batches = [(inputs, labels) for inputs in numbers(*shape)]

    def make() -> Parts:
        own = copy.deepcopy(model)
        return classify, own, momentum(own), batches

    try:
        train(make(), None)
    except RuntimeError:  # an in-place operator has overwritten what a gradient needs
        assume(False)
    trains_the_same(make, form, rtol=1e-6, atol=1e-7)


# In-place writes and views of what is written


def view_sees_a_later_write(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ a
    first = y[:, 0]
    y.relu_()
    return (y * first[:, None]) @ b


def view_is_written(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ a
    y[:, 1].mul_(2.0)
    return y @ b


def view_is_all_that_is_left(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = (x @ a).t()
    y.mul_(2.0).add_(x[:4, :1])
    return (y @ x) * b


def written_by_a_copy(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, ::2] = (x @ a)[:, ::2]
    y.add_(1.0)
    return y @ b


def equal_before_one_is_written(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    first, second = x * 2.0, x * 2.0
    view = first.view(-1)
    first.add_(1.0)
    return (first @ a + second @ b) * view.view_as(first)


def different_after_a_write(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x * 1.0
    view = y.view(-1)
    before = torch.exp(y)
    y.mul_(0.5)
    return (before @ a) + torch.exp(y) @ b * view[0]


def equal_memory_filled_twice(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    first, second = torch.empty_like(x), torch.empty_like(x)
    first.fill_(1.0)
    second.copy_(x)
    return (first @ a) + (second @ b) + first


def written_in_another_type(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x.float() * 1.0
    y.mul_(x[:, :1])
    y.gt_(0.2)
    return (y.double() @ a) @ b


def seen_by_address(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = (x @ a).t()
    y = y * 2.0
    y.add_(1.0)
    return torch.as_strided(y, (2, 4), (1, 6), 3) @ b


def the_batch_is_written(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    first = torch.exp(x) + a[0]
    x.mul_(0.9)
    second = torch.exp(x) + a[1]
    return first + second @ b


def the_same_tensor_twice(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ (a @ a) + torch.addmm(b, b, b)[0]


def sums_of_all_kinds(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = torch.tanh(x @ a)
    total = torch.sum(y, dim=None) + y.sum() + y.sum((0, -1)) + y.sum(1).amax()
    return (y @ b) * total + y.sum(0)


def integers_and_masks(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ a
    mask = (y > 0) & (torch.arange(4) % 2 == 0)
    order = y.detach().argsort(1)
    mask.logical_not_()
    count = mask.sum(1, keepdim=True).clamp_(min=1)
    return torch.where(mask, y, -y).gather(1, order) @ b / count


def turned_in_the_complex_plane(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    pairs = torch.view_as_complex((x @ a).reshape(len(x), 2, 2))
    turned = pairs * torch.polar(torch.ones(2), torch.arange(2.0)).to(pairs)
    return torch.view_as_real(turned).flatten(1) @ b + turned.conj().imag.relu().sum()


def expanded(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = (x @ a).t().contiguous().t()
    wide = y[:, None, :].expand(-1, 3, -1)
    return torch.bmm(wide, b.expand(len(x), 4, 4)) * wide.relu()


def computed_again_in_a_long_chain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    y = x @ a
    for _ in range(200):
        y = torch.tanh(y * 1.01) + 0.01
    return y @ b


FUNCTIONS = [
    view_sees_a_later_write,
    view_is_written,
    view_is_all_that_is_left,
    written_by_a_copy,
    equal_before_one_is_written,
    different_after_a_write,
    equal_memory_filled_twice,
    written_in_another_type,
    seen_by_address,
    the_batch_is_written,
    the_same_tensor_twice,
    sums_of_all_kinds,
    integers_and_masks,
    turned_in_the_complex_plane,
    expanded,
    computed_again_in_a_long_chain,
]


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functions(function: Callable[..., Tensor], form: Form) -> None:
    trains_the_same(lambda: function_parts(function), form, rtol=1e-7, atol=1e-7)


def seen_from_a_convolution(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The convolution's result lies in another order on a GPU, and so would what views see."""
    y = F.conv2d(x, a[:, :, None, None])
    first = y[:, 0]
    y.add_(1.0)
    z = torch.cumsum(y, 1)  # which does not take any order
    y.mul_(0.5)
    return F.conv2d(y * first[:, None], b[:, :, None, None]) + z


def convolved_before_and_after_a_write(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    weight = a[:, :, None, None].expand(4, 4, 2, 2)
    with torch.no_grad():  # nothing of the batch is kept for a gradient
        first = F.conv2d(x, weight)
        x.mul_(0.9)
        second = F.conv2d(x, weight)
    return first * b[0, 0] + second * a[0, 0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "function",
    [seen_from_a_convolution, convolved_before_and_after_a_write],
    ids=lambda function: function.__name__,
)
def test_functions_of_images(function: Callable[..., Tensor], form: Form) -> None:
    trains_the_same(lambda: function_parts(function, 2, 4, 5, 5), form)


# Whole steps


def clips(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def clips_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    for part in batch.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.first.detach().sum()


def leaves_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def updates_twice(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    total = torch.zeros((), dtype=batch.dtype)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total


def looks_again(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = model(batch).square().mean()
        model.second.mul_(0.99)
    return loss, after


STEPS = [clips, clips_one_by_one, accumulates, leaves_gradients, updates_twice, looks_again]


def equal_gradients(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Both weights have equal gradients, in separate memory."""
    return torch.tanh(x @ (a * 1.0) + x @ (b * 1.0)).relu()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps(step: Callable[..., Any], form: Form) -> None:
    def make() -> Parts:
        _, *rest = function_parts(equal_gradients)
        return step, *rest

    is_short = step is updates_twice
    found = trains_the_same(make, form, rtol=2e-2 if is_short else 1e-9)
    assert ("gradient first" in found) == (step is leaves_gradients)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_cleared_every_second_time(form: Form) -> None:
    def make() -> Parts:
        _, model, optimizer, batches = function_parts(view_is_written)

        def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
            inputs, is_second = batch
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            if is_second:
                optimizer.zero_grad()
            return loss

        pairs = [(inputs, index == 1) for index, inputs in enumerate(batches)]
        return train_step, model, optimizer, pairs

    trains_the_same(make, form, steps=5)


# Random numbers


class Dropped(nn.Module):
    """A weight and dropout: the mask shows in the gradient."""

    def __init__(self, p: float, how: str) -> None:
        super().__init__()
        self.p, self.how = p, how
        self.weight = nn.Parameter(torch.ones(40, 25))

    def forward(self, x: Tensor) -> Tensor:
        y = (x * self.weight).exp()
        if self.how == "native":
            return torch.native_dropout(y, self.p, True)[0]
        if self.how == "in place":
            return F.dropout(y.mul(1.0), self.p, inplace=True)
        if self.how == "checkpoint":
            return checkpoint(lambda z: F.dropout(z.sin(), self.p).exp(), y, use_reentrant=False)
        return F.dropout(y, self.p)


def keeps_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Any:
    optimizer.zero_grad()
    result = model(batch)
    result.sum().backward()
    optimizer.step()
    return result


def dropped(p: float, how: str) -> Parts:
    model = Dropped(p, how).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return keeps_gradients, model, optimizer, [torch.full((40, 25), 0.5).double()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("how", ["plain", "native", "in place"])
def test_dropout_of_all_or_nothing(how: str, p: float, form: Form) -> None:
    trains_the_same(lambda: dropped(p, how), form)


@pytest.mark.parametrize("form", [grouped, grouped_for_gpu])
@pytest.mark.parametrize("how", ["plain", "native", "in place"])
def test_the_gradient_has_the_mask_of_the_forward_pass(how: str, form: Form) -> None:
    found = train(dropped(0.25, how), form, steps=2)
    for index in range(2):
        result = found[f"result {index}.0"]
        share = (result != 0).double().mean().item()
        assert share == pytest.approx(0.75, abs=0.08)
        kept = result[result != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, torch.e**0.5 / 0.75).double())
    assert not torch.equal(found["result 0.0"] != 0, found["result 1.0"] != 0)
    torch.testing.assert_close(found["gradient weight"], found["result 1.0"] * 0.5)


@pytest.mark.parametrize("form", FORMS)
def test_states_that_the_step_sets_give_the_masks_they_always_gave(form: Form) -> None:
    """A checkpoint computes again with the random state it started from."""
    trains_the_same(lambda: dropped(0.25, "checkpoint"), form)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_that_is_not_compiled_draws_as_ever(form: Form) -> None:
    """Calls after the optimizer are not compiled, so that their masks cannot come from seeds."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Any:
        loss = (batch * model.weight).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, keeps_gradients(model, optimizer, batch)

    def make() -> Parts:
        _, *rest = dropped(0.25, "plain")
        return train_step, *rest

    trains_the_same(make, form)


# Matrix products with sides that are multiples of eight


def whole_numbers(*shape: int) -> Tensor:
    """Such that sums of products are exact in sixteen bits."""
    return torch.randint(-2, 3, shape).bfloat16()


class Vocabulary(nn.Module):
    """Products of short numbers with odd sides, of a weight that is changed in the step."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(whole_numbers(13, 6))
        self.inner = nn.Parameter(whole_numbers(6, 6))
        self.bias = nn.Parameter(whole_numbers(13)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.inner
        turned = hidden.t()
        turned.relu_()
        return F.linear(turned.t(), self.table, self.bias)


def sums(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
    inputs, weights = batch
    optimizer.zero_grad()
    result = model(inputs)
    (result * weights).sum().backward()
    grads = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    with torch.no_grad():
        model.table.clamp_(-1, 1)
    return result, *grads, model(inputs).detach()


@pytest.mark.parametrize("bias", [False, True])
def test_padded_matmuls(bias: bool) -> None:
    """Every number is exact, so that they are the same."""

    def make() -> Parts:
        model = Vocabulary(bias)
        batch = whole_numbers(9, 6), torch.randint(-1, 2, (9, 13)).bfloat16()
        return sums, model, torch.optim.SGD(model.parameters(), lr=0.0), [batch]

    trains_the_same(make, padded_for_gpu, steps=2, rtol=0, atol=0)
    recording = decompose(recorded(make()), for_gpu=True, padding=PAD_ALL)
    tape = recording.tape
    products = [c for c in tape.calls if c.node.target in (aten.mm.default, aten.addmm.default)]
    assert len(products) == 7
    for call in products:
        *_, a, b = (tape.metas[node] for node in call.node.all_input_nodes)
        sides = {tuple(m.shape)[0 if m.stride[0] == 1 else 1] for m in (a, b)}
        assert all(side % 8 == 0 for side in sides)


def test_other_matmuls_are_left_alone() -> None:
    """Of a tensor with itself; with a bias of another shape; with factors."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(whole_numbers(5, 5))
            self.column = nn.Parameter(whole_numbers(5, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = self.weight @ self.weight
            y = torch.addmm(self.column, y, x)
            y = torch.addmm(self.weight[:1, :1], y, x)
            return torch.addmm(x, y, x, beta=2.0, alpha=0.5)

    def make() -> Parts:
        model = Odd()
        return square, model, momentum(model), [whole_numbers(5, 5)]

    trains_the_same(make, padded_for_gpu, steps=1, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_gradient_of_scores_needs_no_sum_over_classes(reduction: int) -> None:
    """The same as the two operators in turn, with a label that is ignored."""
    scores = torch.randn(6, 5).double().log_softmax(1)
    target = torch.tensor([0, 4, 2, -100, 1, 3])
    grad = torch.rand(6).double() if reduction == 0 else torch.rand(()).double()
    total = torch.tensor(5.0).double()
    of_loss = aten.nll_loss_backward(grad, scores, target, None, reduction, -100, total)
    expected = aten._log_softmax_backward_data(of_loss, scores, 1, torch.double)
    args = (target, -100, total, reduction, torch.double)
    torch.testing.assert_close(decompositions.scores_gradient(scores, grad, *args), expected)

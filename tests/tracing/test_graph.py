"""The captured graph of small steps, field by field, against values derived by hand."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rekindle
from rekindle.core.graph.graph import Op, Phase, Role, Source, StepGraph


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the one line of a function that contains a text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = (number for number, line in enumerate(lines, start) if text in line)
    return number


def regress(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    prediction = model(batch[0])
    loss = F.mse_loss(prediction, batch[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def graph_of(
    model: nn.Module,
    batch: Any,
    train_step: Callable[..., Any] = regress,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> StepGraph:
    made = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    return rekindle.capture(train_step, model, made, batch).graph


def mlp_graph(rows: int = 2) -> StepGraph:
    return graph_of(mlp(), (torch.ones(rows, 5), torch.ones(rows, 3)))


def names(graph: StepGraph, values: tuple[int, ...]) -> list[str]:
    return [graph.values[value].name for value in values]


def find(graph: StepGraph, target: str) -> list[Op]:
    return [op for op in graph.ops if op.target == f"aten.{target}"]


def role_of(graph: StepGraph, value: int) -> Role:
    return graph.storage_of(value).role


def storage_named(graph: StepGraph, name: str) -> Any:
    (value,) = (value for value in graph.values if value.name == name)
    return graph.storage_of(value.index)


FORWARD, LOSS, BACKWARD, UPDATE = "FORWARD", "LOSS", "BACKWARD", "OPTIMIZER"
# name, target, phase, inputs, outputs, mutates, is_view, flops, module, the line's text
MLP_OPS: list[tuple[str, str, str, str, str, str, bool, int, str, str]] = [
    ("t", "t.default", FORWARD, "param_0_weight", "t", "", True, 0, "0", "model("),
    (
        *("addmm", "addmm.default", FORWARD, "param_0_bias batch_0 t", "addmm", "", False),
        *(2 * 2 * 5 * 4, "0", "model("),
    ),
    ("relu", "relu.default", FORWARD, "addmm", "relu", "", False, 0, "1", "model("),
    ("t_1", "t.default", FORWARD, "param_2_weight", "t_1", "", True, 0, "2", "model("),
    (
        *("addmm_1", "addmm.default", FORWARD, "param_2_bias relu t_1", "addmm_1", "", False),
        *(2 * 2 * 4 * 3, "2", "model("),
    ),
    (
        *("mse_loss", "mse_loss.default", LOSS, "addmm_1 batch_1", "mse_loss", "", False),
        *(0, "", "mse_loss("),
    ),
    (
        *("ones_like", "ones_like.default", BACKWARD, "mse_loss", "ones_like", "", False),
        *(0, "", "backward("),
    ),
    (
        *("mse_loss_backward", "mse_loss_backward.default", BACKWARD),
        *("ones_like addmm_1 batch_1", "mse_loss_backward", "", False, 0, "", "mse_loss("),
    ),
    (
        *("mm", "mm.default", BACKWARD, "mse_loss_backward param_2_weight", "mm", "", False),
        *(2 * 2 * 3 * 4, "2", "model("),
    ),
    ("t_2", "t.default", BACKWARD, "mse_loss_backward", "t_2", "", True, 0, "2", "model("),
    (
        *("mm_1", "mm.default", BACKWARD, "t_2 relu", "mm_1", "", False),
        *(2 * 3 * 2 * 4, "2", "model("),
    ),
    (
        *("sum_1", "sum.dim_IntList", BACKWARD, "mse_loss_backward", "sum_1", "", False),
        *(0, "2", "model("),
    ),
    ("view", "view.default", BACKWARD, "sum_1", "view", "", True, 0, "2", "model("),
    (
        *("threshold_backward", "threshold_backward.default", BACKWARD, "mm relu"),
        *("threshold_backward", "", False, 0, "1", "model("),
    ),
    ("t_4", "t.default", BACKWARD, "threshold_backward", "t_4", "", True, 0, "0", "model("),
    (
        *("mm_2", "mm.default", BACKWARD, "t_4 batch_0", "mm_2", "", False),
        *(2 * 4 * 2 * 5, "0", "model("),
    ),
    (
        *("sum_2", "sum.dim_IntList", BACKWARD, "threshold_backward", "sum_2", "", False),
        *(0, "0", "model("),
    ),
    ("view_1", "view.default", BACKWARD, "sum_2", "view_1", "", True, 0, "0", "model("),
    *(
        (name, "add_.Tensor", UPDATE, f"{param} {grad}", "", param, False, 0, "", "optimizer.step(")
        for name, param, grad in (
            ("add_", "param_0_weight", "mm_2"),
            ("add__1", "param_0_bias", "view_1"),
            ("add__2", "param_2_weight", "mm_1"),
            ("add__3", "param_2_bias", "view"),
        )
    ),
]


@pytest.mark.parametrize("expected", MLP_OPS, ids=lambda row: row[0])
def test_every_op_of_an_mlp(expected: Any) -> None:
    name, target, phase, inputs, outputs, mutates, is_view, flops, module, line = expected
    graph = mlp_graph()
    (op,) = (op for op in graph.ops if op.name == name)
    assert op.target == f"aten.{target}"
    assert op.phase is Phase[phase]
    assert names(graph, op.inputs) == inputs.split()
    assert names(graph, op.outputs) == outputs.split()
    assert names(graph, op.mutates) == mutates.split()
    assert (op.is_view, op.is_random, op.flops) == (is_view, False, flops)
    assert op.source == Source(module, __file__, line_of(regress, line))


def test_the_order_of_an_mlps_ops() -> None:
    graph = mlp_graph()
    assert [op.name for op in graph.ops] == [row[0] for row in MLP_OPS]
    assert [op.index for op in graph.ops] == list(range(len(graph.ops)))


MLP_STORAGES: list[tuple[str, int, Role]] = [
    ("param_0_weight t", 4 * 5, Role.PARAM),
    ("param_0_bias", 4, Role.PARAM),
    ("param_2_weight t_1", 3 * 4, Role.PARAM),
    ("param_2_bias", 3, Role.PARAM),
    ("batch_0", 2 * 5, Role.INPUT),
    ("batch_1", 2 * 3, Role.INPUT),
    ("addmm", 2 * 4, Role.TEMP),  # relu's backward reads relu's output
    ("relu", 2 * 4, Role.ACTIVATION),
    ("addmm_1", 2 * 3, Role.ACTIVATION),
    ("mse_loss", 2 * 3, Role.OUTPUT),  # torch computes it in the memory of all differences
    ("ones_like", 1, Role.GRAD_MAP),
    ("mse_loss_backward t_2", 2 * 3, Role.GRAD_MAP),
    ("mm", 2 * 4, Role.GRAD_MAP),
    ("mm_1", 3 * 4, Role.GRAD),
    ("sum_1 view", 3, Role.GRAD),
    ("threshold_backward t_4", 2 * 4, Role.GRAD_MAP),
    ("mm_2", 4 * 5, Role.GRAD),
    ("sum_2 view_1", 4, Role.GRAD),
]


def test_every_storage_of_an_mlp() -> None:
    graph = mlp_graph()
    found = [
        (
            " ".join(value.name for value in graph.values if value.storage == storage.index),
            storage.nbytes,
            storage.role,
        )
        for storage in graph.storages
    ]
    assert found == [(held, 4 * numbers, role) for held, numbers, role in MLP_STORAGES]
    assert {storage.device for storage in graph.storages} == {"cpu"}
    assert [storage.index for storage in graph.storages] == list(range(len(graph.storages)))


def test_the_values_and_outputs_of_an_mlp() -> None:
    graph = mlp_graph()
    assert names(graph, graph.outputs) == ["mse_loss"]
    assert {value.dtype for value in graph.values} == {"float32"}
    shapes = {value.name: value.shape for value in graph.values}
    assert shapes["t"] == (5, 4)
    assert shapes["addmm"] == shapes["relu"] == shapes["mm"] == (2, 4)
    assert shapes["mse_loss"] == ()
    producers = {value.name: value.producer for value in graph.values}
    assert producers["param_0_weight"] is producers["batch_1"] is None
    assert all(graph.values[v].producer == op.index for op in graph.ops for v in op.outputs)


def test_gradients_that_stay_are_outputs() -> None:
    """Without `zero_grad` at the end, the gradients are alive when the step ends."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    graph = graph_of(mlp(), (torch.ones(2, 5), torch.ones(2, 3)), train_step)
    assert names(graph, graph.outputs) == ["mm_2", "view_1", "mm_1", "view"]
    assert {role_of(graph, value) for value in graph.outputs} == {Role.GRAD}


def phases(graph: StepGraph) -> list[str]:
    """The phases in order, without repetitions."""
    return [phase.name for phase, _ in itertools.groupby(op.phase for op in graph.ops)]


def test_phases_of_gradient_accumulation() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            (F.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = graph_of(mlp(), (torch.ones(4, 5), torch.ones(4, 3)), train_step)
    assert phases(graph) == [FORWARD, LOSS, BACKWARD, FORWARD, LOSS, BACKWARD, UPDATE]
    assert sum(graph.count_by_phase().values()) == len(graph.ops)


def test_clipping_belongs_to_the_optimizer() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    graph = graph_of(mlp(), (torch.ones(2, 5), torch.ones(2, 3)), train_step)
    assert phases(graph) == [FORWARD, LOSS, BACKWARD, UPDATE]


# The fingerprint

SOURCE = """
def train_step(model, optimizer, batch):
    loss = (model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


def step_from(filename: str, blank_lines: int) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(compile("\n" * blank_lines + SOURCE, filename, "exec"), scope)
    step: Callable[..., Any] = scope["train_step"]
    return step


def test_fingerprint() -> None:
    assert mlp_graph().fingerprint == mlp_graph().fingerprint
    assert mlp_graph(2).fingerprint != mlp_graph(3).fingerprint


def test_fingerprint_does_not_depend_on_where_the_code_is() -> None:
    batch = (torch.ones(2, 5), torch.ones(2, 3))
    graphs = [
        graph_of(mlp(), batch, step_from(filename, blank_lines))
        for filename, blank_lines in (("/somewhere/train.py", 0), ("/elsewhere/loop.py", 40))
    ]
    files = [{op.source.filename for op in graph.ops} for graph in graphs]
    assert files == [{"/somewhere/train.py"}, {"/elsewhere/loop.py"}]
    assert graphs[0].fingerprint == graphs[1].fingerprint


# Storages


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def test_tied_weights_count_once() -> None:
    graph = graph_of(Tied(), (torch.ones(2, 4), torch.ones(2, 4)))
    assert graph.bytes_by_role()[Role.PARAM] == 4 * 4 * 4
    assert [v.name for v in graph.values if v.name.startswith("param")] == ["param_first_weight"]
    (update,) = (op for op in graph.ops if op.phase is Phase.OPTIMIZER)
    assert names(graph, update.mutates) == ["param_first_weight"]


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x).view(2, 2, 3).transpose(1, 2)[:, 0].unsqueeze(-1)
        return out.expand(2, 2, 5)


def test_views_add_no_storage() -> None:
    graph = graph_of(Viewing(), (torch.ones(2, 4), torch.ones(2, 2, 5)))
    (addmm,) = find(graph, "addmm.default")
    storage = graph.storage_of(addmm.outputs[0])
    views = [find(graph, t)[0] for t in ("view.default", "transpose.int", "expand.default")]
    assert all(op.is_view and not op.mutates for op in views)
    assert {graph.storage_of(op.outputs[0]).index for op in views} == {storage.index}
    assert storage.nbytes == 2 * 6 * 4


def test_in_place_ops_mutate_and_add_no_storage() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    graph = graph_of(model, (torch.ones(2, 5), torch.ones(2, 3)))
    (relu,) = find(graph, "relu_.default")
    assert relu.outputs == ()
    assert names(graph, relu.inputs) == names(graph, relu.mutates) == ["addmm"]
    assert not relu.is_view
    assert role_of(graph, relu.mutates[0]) is Role.ACTIVATION
    assert len(graph.storages) == len(mlp_graph().storages) - 1


def test_random_ops() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    graph = graph_of(model, (torch.ones(2, 5), torch.ones(2, 3)))
    (draw,) = (op for op in graph.ops if op.is_random)
    assert draw.target == "aten.bernoulli_.float"
    assert draw.source.module == "1"
    in_eval_mode = graph_of(model.eval(), (torch.ones(2, 5), torch.ones(2, 3)))
    assert not [op for op in in_eval_mode.ops if op.is_random]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)[:, 0]


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_is_random_only_with_dropout(dropout: float) -> None:
    batch = (torch.ones(2, 3, 8), torch.ones(2, 3, 8))
    graph = graph_of(Attention(dropout), batch)
    assert any(op.is_random for op in graph.ops) == (dropout > 0)


def test_the_state_of_adam_is_known_before_the_first_step() -> None:
    model = mlp()
    batch = (torch.ones(2, 5), torch.ones(2, 3))
    graph = graph_of(model, batch, optimizer=torch.optim.Adam)
    n_bytes = sum(param.numel() * 4 for param in model.parameters())
    sums = graph.bytes_by_role()
    assert sums[Role.PARAM] == sums[Role.GRAD] == n_bytes
    assert sums[Role.OPT_STATE] == 2 * n_bytes + 4 * 4  # two averages, and a step count each
    for key in ("exp_avg", "exp_avg_sq"):
        state = storage_named(graph, f"state_0_weight_{key}")
        assert (state.nbytes, state.role) == (4 * 5 * 4, Role.OPT_STATE)
        written = {v for op in graph.ops for v in op.mutates if op.phase is Phase.OPTIMIZER}
        assert state.index in {graph.values[v].storage for v in written}


def test_the_state_of_adam_is_the_same_after_steps() -> None:
    """A capture before and one after the first step describe the same step."""
    model = mlp()
    batch = (torch.ones(2, 5), torch.ones(2, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fresh = rekindle.capture(regress, model, optimizer, batch).graph
    regress(model, optimizer, batch)
    later = rekindle.capture(regress, model, optimizer, batch).graph
    assert later.bytes_by_role() == fresh.bytes_by_role()
    assert [op.target for op in later.ops] == [op.target for op in fresh.ops]


def test_batch_norm_writes_its_running_statistics() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    batch = (torch.ones(2, 5), torch.ones(2, 3))
    graph = graph_of(model, batch)
    written = {name for op in graph.ops for name in names(graph, op.mutates)}
    buffers = {"buffer_1_running_mean", "buffer_1_running_var", "buffer_1_num_batches_tracked"}
    assert buffers <= written
    assert {storage_named(graph, name).role for name in buffers} == {Role.BUFFER}
    assert graph.bytes_by_role()[Role.BUFFER] == 4 * 4 + 4 * 4 + 8
    in_eval_mode = graph_of(model.eval(), batch)
    written = {name for op in in_eval_mode.ops for name in names(in_eval_mode, op.mutates)}
    assert not buffers & written


def test_a_result_is_an_output_even_if_the_backward_pass_reads_it() -> None:
    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        out = model(batch[0])
        F.mse_loss(out, batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"out": out, "x": batch[0]}

    graph = graph_of(mlp(), (torch.ones(2, 5), torch.ones(2, 3)), train_step)
    assert names(graph, graph.outputs) == ["addmm_1", "batch_0"]
    assert [role_of(graph, value) for value in graph.outputs] == [Role.OUTPUT, Role.INPUT]


# Sources


def test_source_of_a_backward_op_is_the_forward_line() -> None:
    class TwoLines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            x = x.sigmoid()
            return x.tanh()

    graph = graph_of(TwoLines(), (torch.ones(2, 5), torch.ones(2, 3)))
    for target, text, module in (
        ("tanh_backward.default", "tanh()", ""),
        ("sigmoid_backward.default", "sigmoid()", ""),
        ("mm.default", "self.inner(", "inner"),
    ):
        (op,) = find(graph, target)
        assert op.phase is Phase.BACKWARD
        assert op.source == Source(module, __file__, line_of(TwoLines.forward, text))


def test_source_of_a_backward_op_when_other_ops_come_between() -> None:
    """An operator without a gradient must not be taken for the one whose backward runs."""

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        out = model(batch[0]).sigmoid()
        right = out.detach().argmax(1) == batch[1].argmax(1)
        loss = F.mse_loss(out, batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, right

    graph = graph_of(mlp(), (torch.ones(2, 5), torch.ones(2, 3)), train_step)
    (op,) = find(graph, "sigmoid_backward.default")
    assert op.source.lineno == line_of(train_step, "sigmoid()")


# Work


def test_flops_of_a_matrix_product() -> None:
    """The backward pass of an inner linear layer does twice the work of its forward pass."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    graph = graph_of(model, (torch.ones(13, 5), torch.ones(13, 3)))

    def flops(module: str, phase: Phase) -> int:
        ops = (op for op in graph.ops if op.source.module == module and op.phase is phase)
        return sum(op.flops for op in ops)

    assert flops("2", Phase.FORWARD) == 2 * 13 * 7 * 11
    assert flops("2", Phase.BACKWARD) == 2 * flops("2", Phase.FORWARD)
    assert flops("0", Phase.BACKWARD) == flops("0", Phase.FORWARD) == 2 * 13 * 5 * 7
    forward = 2 * 13 * (5 * 7 + 7 * 11 + 11 * 3)
    assert graph.flops_by_phase() == {
        Phase.FORWARD: forward,
        Phase.LOSS: 0,
        Phase.BACKWARD: 2 * forward - 2 * 13 * 5 * 7,
        Phase.OPTIMIZER: 0,
    }


def test_flops_of_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2))
    graph = graph_of(model, (torch.ones(2, 3, 9, 9), torch.ones(2, 6, 4, 4)))
    forward = [op.flops for op in find(graph, "convolution.default")]
    assert forward == [2 * 2 * 4 * 9 * 9 * 3 * 3 * 3, 2 * 2 * 6 * 4 * 4 * 4 * 3 * 3]
    backward = [op.flops for op in find(graph, "convolution_backward.default")]
    assert backward == [2 * forward[1], forward[0]]  # the batch needs no gradient

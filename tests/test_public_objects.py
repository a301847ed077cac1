"""Public objects show themselves on one line, and as a small table in notebooks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from support.tiny_step import NASTY, nasty_graph, tiny_plan, tiny_step
from torch import nn

import rekindle
from rekindle.core.cost.batch_search import Fit
from rekindle.core.cost.devices import find_device
from rekindle.core.graph.comparison import Comparison

GRAPH, PROFILE, TRACE = tiny_step()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Any:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))


@cache
def trained() -> rekindle.TrainStep:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return rekindle.optimize(train_step, net, optimizer, torch.randn(4096, 16), budget="70%")


@cache
def compiled() -> nn.Module:
    found = rekindle.compile(model(), budget="80%", lower="eager")
    found(torch.randn(512, 16)).sum().backward()
    return found


def comparison() -> Comparison:
    return Comparison(
        graph=GRAPH,
        capture_us=1000.0,
        plain_samples_us=(2000.0,) * 3,
        captured_samples_us=(3000.0,) * 3,
        plain_peak_bytes=8 << 20,
        captured_peak_bytes=6 << 20,
        compared={"parameter": 3},
        differences=tuple(f"parameter {n}{NASTY}" for n in range(1000)),
        budget_bytes=7 << 20,
        trace=TRACE,
    )


def largest_batch() -> rekindle.LargestBatch:
    fit = Fit(64, 1 << 30, 1e6)
    return rekindle.LargestBatch(2 << 30, "H200", "by hand", fit, Fit(128, 2 << 30, 2e6), 0.9, None)


OBJECTS = {  # and what both forms have to say
    "Profile": (lambda: PROFILE, ["Toy GPU", "500 µs", "7, measured"]),
    "Trace": (lambda: TRACE, ["7.10 MiB", "500 µs", "threshold_backward"]),
    "StepGraph": (lambda: nasty_graph(), ["9.00M", "4.00 MiB"]),
    "Plan": (tiny_plan, ["by hand", "8.00 MiB", "1 of 1 activations", "120 µs"]),
    "Comparison": (comparison, ["different after 3 steps", "8.00 MiB in 2.00 ms", "1000: "]),
    "Layout": (lambda: rekindle.layout(GRAPH), ["arena", "5.00 MiB", "6"]),
    "LargestBatch": (largest_batch, ["64 at 64.0 samples/s", "128", "none fits", "2.00 GiB"]),
    "Measurement": (lambda: trained().measure(torch.randn(4096, 16), 2), ["peak", "samples"]),
    "CapturedStep": (lambda: trained().captured, ["ops", "captures 1"]),
    "TrainStep": (trained, ["budget", "forecast peak", "activations"]),
    "CompiledModel": (compiled, ["Sequential", "80%", "graphs 1", "added time"]),
    "EngineInfo": (lambda: trained().engine_info, ["engine", "python"]),
    "Device": (lambda: find_device("H100"), ["H100", "80.0 GiB", "TB/s"]),
}


class Texts(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("name", OBJECTS)
def test_it_shows_its_main_numbers(name: str) -> None:
    make, words = OBJECTS[name]
    shown = make()
    line, page = repr(shown), shown._repr_html_()
    assert type(shown).__name__ == name
    assert line.startswith(f"<{name}: ")
    assert line.isprintable()
    assert len(line) <= 200
    assert str(shown) == line
    parser = Texts()
    parser.feed(page)
    assert parser.tags == {"table", "caption", "tr", "th", "td"}
    assert len(page) < 5000
    for word in words:
        assert word in line
        assert word in " ".join(parser.texts)


def test_a_plain_step_and_one_that_was_never_compiled() -> None:
    assert "plain" not in repr(replace(comparison(), plain_fits=False, compared={}))
    assert "graphs none compiled yet" in repr(rekindle.compile(model(), budget="1GiB"))

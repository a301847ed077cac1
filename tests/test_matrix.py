"""A sample of the matrix: public models train to the same bits. `make matrix` runs all of them."""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.matrix import BUDGETS, cell, zoo
from benchmarks.matrix import __main__ as matrix
from benchmarks.matrix.pool import Pool

SAMPLE = [
    "timm-test_mambaout",
    "timm-test_vit",
    "torchvision-squeezenet1_1",
    "torchvision-raft_small",
    "transformers-BartForConditionalGeneration",
    "transformers-BertForMaskedLM",
    "transformers-DistilBertForMaskedLM",
    "transformers-FalconForCausalLM",
    "transformers-GemmaForCausalLM",
    "transformers-LEDForConditionalGeneration",
    "transformers-MistralForCausalLM",
    "transformers-NystromformerForMaskedLM",
    "transformers-OPTForCausalLM",
    "transformers-PegasusForConditionalGeneration",
    "transformers-Qwen2ForCausalLM",
    "transformers-RoFormerForMaskedLM",
    "transformers-T5ForConditionalGeneration",
    "transformers-ViTForImageClassification",
    "transformers-Wav2Vec2ForCTC",
    "transformers-XGLMForCausalLM",
]


def case_of(name: str) -> zoo.Case:
    pytest.importorskip(name.partition("-")[0])
    (case,) = [case for case in matrix.cases() if case.name == name]
    return case


def outcomes(name: str, *budgets: str) -> dict[str, tuple[str, str]]:
    found = cell.run(case_of(name), budgets)
    return {budget: (found[budget]["outcome"], found[budget].get("reason", "")) for budget in found}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAMPLE)
def test_without_a_budget(name: str) -> None:
    assert outcomes(name, "none") == {"none": ("equal", "")}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["torchvision-squeezenet1_1", "transformers-BartForConditionalGeneration"]
)
def test_within_budgets(name: str) -> None:
    found = outcomes(name, *BUDGETS)
    assert found == dict.fromkeys(BUDGETS, ("equal", ""))


def test_the_list() -> None:
    """At least 200 models, each once; those that are left out have a reason."""
    names = [case.name for case in matrix.cases()]
    assert len(names) == len(set(names)) >= 200
    listed = json.loads(matrix.MODELS.read_text(encoding="utf-8"))
    assert all(listed["left_out"].values())
    assert set(listed["left_out"]).isdisjoint(names)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that Rekindle got wrong would not pass as equal."""
    plainly = importlib.import_module("rekindle").optimize

    def wrong(train_step: Any, model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        step = plainly(train_step, model, optimizer, batch, **options)

        def run(batch: Any) -> Any:
            loss = step(batch)
            next(model.parameters()).data.mul_(1.0001)
            return loss

        return run

    monkeypatch.setattr(cell.rekindle, "optimize", wrong)
    outcome, reason = outcomes("torchvision-squeezenet1_1", "none")["none"]
    assert outcome == "different"
    assert "parameter" in reason


def answer(connection: Any) -> None:
    while True:
        case, _ = connection.recv()
        if case[1] == "dies":
            os._exit(3)
        if case[1] == "hangs":
            time.sleep(600)
        connection.send({"none": {"outcome": "equal"}})


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_is_replaced() -> None:
    pool = Pool(answer, limit_s=2.0, start_s=60.0)
    names = ("fine", "dies", "fine", "hangs", "fine")
    ask = [pool.ask(zoo.Case("", name, "", 0)) for name in names]
    pool.end()
    assert ask[0] == ask[2] == ask[4] == {"none": {"outcome": "equal"}}
    assert ask[1] == {"died": "the process died with exit code 3"}
    assert ask[3] == {"died": "took more than 2 s"}


def test_results_are_kept_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell with a result is not run again; every one that is not equal has its reason."""
    asked: list[str] = []
    last: list[str] = []

    class Fake:
        def __init__(self, *_: object) -> None: ...

        def ask(self, case: zoo.Case, budgets: Any) -> dict[str, Any]:
            asked.append(case.name)
            last[:] = budgets
            if len(asked) == 1:
                return {"died": "took more than 9 s"}
            equal = {"outcome": "equal"}
            over = {"outcome": "over", "reason": "by 8"}
            answers = {"none": equal, "halfway": equal, "least": over}
            return {budget: answers[budget] for budget in budgets}

        def end(self) -> None: ...

    monkeypatch.setattr(matrix, "Pool", Fake)
    first, second = matrix.cases()[:2]
    matrix.run_all([first], tmp_path)
    matrix.run_all([first, second], tmp_path, ["none"])
    assert last == ["none"]
    matrix.run_all([first, second], tmp_path)
    assert last == ["halfway", "least"]
    assert asked == [first.name, second.name, second.name]
    text = matrix.summary(list(matrix._results(tmp_path)))
    assert text.startswith("2 models, 6 cells")
    assert "2 of 2 models accepted" in text
    assert f"error none {first.name}: took more than 9 s" in text
    assert f"over least {second.name}: by 8" in text

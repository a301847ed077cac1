"""The document is what its results say, and says what is not there."""

from __future__ import annotations

import doctest
import json
import shutil
from pathlib import Path

import pytest

from experiments import RESULTS, page
from experiments import document as experiments_document
from experiments.document import DOCUMENT, FIGURES, SECTIONS, TEMPLATE, document, page_of
from experiments.sections import sources

pytest.importorskip("matplotlib")

EVERY = "\n\n".join(f"{{{{{name}}}}}" for name in SECTIONS)


def test_the_document_was_made_from_the_results_that_are_there(tmp_path: Path) -> None:
    text = document(TEMPLATE.read_text(encoding="utf-8"), page_of(figures=tmp_path))
    assert text == DOCUMENT.read_text(encoding="utf-8"), "results have changed: make experiments"
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in FIGURES.glob("*.png")}


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    empty = page_of(results=tmp_path, benchmarks=tmp_path, figures=tmp_path / "figures")
    text = document(EVERY, empty)
    pieces = ("statistics", "shares", "sweep-resnet152", "planners-bert-large", "fits")
    for piece in (*pieces, "compiled-16GiB"):
        assert f"Not measured yet: `python -m experiments.collect --piece {piece}`" in text
    assert "Nothing has been measured yet" in text
    assert not empty.figures.exists()


@pytest.mark.slow
def test_what_is_only_begun_is_said(tmp_path: Path) -> None:
    """Planners of which not every plan was run, and caps under which not every batch was."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    for name in ("planners-bert-large", "max-batch-16GiB"):
        path = tmp_path / f"{name}.json"
        piece = json.loads(path.read_text(encoding="utf-8"))
        piece["cases"] = [{**piece["cases"][0], "status": "unfinished"}]
        path.write_text(json.dumps(piece), encoding="utf-8")
    text = document(EVERY, page_of(results=tmp_path, figures=tmp_path / "figures"))
    for piece in ("planners-bert-large", "max-batch-16GiB"):
        assert (
            f"The rest is not measured yet: `python -m experiments.collect --piece {piece}`" in text
        )


def test_what_failed_is_said(tmp_path: Path) -> None:
    case = {"model": "resnet152", "batch": 64, "way": "plain", "budget": None}
    common = {"status": "failed", "commit": "abc", "seconds": 1.0}
    rows = [
        {"kind": "case", "settings": {"case": case}, "found": {"message": "a\nb"}, **common},
        {"kind": "shares", "settings": {"model": "mlp"}, "message": "KeyError: 'c'", **common},
    ]
    head = {"gpu": "H200", "versions": {"python": "3", "torch": "2"}}
    (tmp_path / "made-up.json").write_text(json.dumps({**head, "cases": rows}))
    text = sources.section(page_of(results=tmp_path, benchmarks=tmp_path, figures=tmp_path))
    assert "- `made-up`: case resnet152 64 plain: a\n" in text
    assert text.endswith("- `made-up`: shares mlp: KeyError: 'c'")


def test_a_template_names_every_section_once(tmp_path: Path) -> None:
    empty = page_of(results=tmp_path, benchmarks=tmp_path, figures=tmp_path)
    with pytest.raises(ValueError, match="memory"):
        document(EVERY.replace("{{memory}}", ""), empty)
    with pytest.raises(ValueError, match="weather"):
        document(EVERY + "\n\n{{weather}}", empty)


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(page)
    assert found.attempted >= 3
    assert found.failed == 0


def test_one_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "of-before.png").write_bytes(b"")
    made = page_of(results=tmp_path, figures=figures)
    monkeypatch.setattr(experiments_document, "ROOT", tmp_path)
    monkeypatch.setattr(experiments_document, "DOCUMENT", tmp_path / "experiments.md")
    monkeypatch.setattr(experiments_document, "FIGURES", figures)
    monkeypatch.setattr(experiments_document, "page_of", lambda: made)
    experiments_document.main()
    assert "wrote experiments.md" in capsys.readouterr().out
    assert (tmp_path / "experiments.md").read_text(encoding="utf-8").startswith("# Experiments")
    assert not (figures / "of-before.png").exists()

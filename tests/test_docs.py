"""The docs: code blocks run, links and images resolve, and pages are listed and up to date."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.commands import run

import rekindle

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + PAGES

# Pages with code that runs, and what it prints.
PRINTED = {
    "tutorial/out-of-memory": "True ()",
    "how-to/keep-your-loop": "[(",
    "how-to/find-the-largest-batch": "largest planned (",
    "how-to/use-lora": "LoRA: True",
    "how-to/train-with-variable-lengths": "captures: 3",
    "how-to/profile-memory": "random: ['aten.",
    "how-to/read-a-plan": "computed again",
    "explanation/how-it-works": "a peak of",
}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def _without_code(text: str) -> str:
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", _text(path), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {word.strip().replace(" ", "-") for word in words}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_python_blocks_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scope: dict[str, Any] = {"__name__": name}
    for index, block in enumerate(_blocks(_text(DOCS / f"{name}.md"), "python")):
        exec(compile(block, f"{name}.md, block {index}", "exec"), scope)
    assert PRINTED[name] in capsys.readouterr().out


def test_every_python_block_is_run_or_at_least_parsed() -> None:
    """What is fenced as `python` runs above; `py` marks code that needs more than it shows."""
    have_code = {path.relative_to(DOCS).with_suffix("").as_posix() for path in PAGES}
    have_code = {name for name in have_code if _blocks(_text(DOCS / f"{name}.md"), "python")}
    assert have_code == set(PRINTED)
    shown = [block for path in PAGES for block in _blocks(_text(path), "py")]
    assert len(shown) >= 5
    for block in shown:
        ast.parse(block)


@pytest.mark.parametrize("path", TEXTS, ids=_name)
def test_links_and_images_resolve(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _without_code(_text(path))):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        is_known = page.exists() and (not anchor or anchor in _anchors(page))
        # The site has only what is in docs/.
        is_inside = path not in PAGES or page.resolve().is_relative_to(DOCS)
        if not (is_known and is_inside):
            broken.append(link)
    assert broken == []


def test_the_site_lists_every_page_once() -> None:
    nav = _text(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    listed = re.findall(r"^ *- (?:.*: )?(\S+\.md)$", nav, flags=re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


def test_every_image_is_shown() -> None:
    shown = {
        (path.parent / link).resolve()
        for path in TEXTS
        for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", _text(path))
    }
    assert shown == set(DOCS.rglob("*.png"))


def test_the_api_page_has_every_public_name() -> None:
    named = re.findall(r"^::: rekindle\.(\w+)$", _text(DOCS / "reference/api.md"), re.MULTILINE)
    assert sorted(named) == sorted(rekindle.__all__)


@pytest.fixture(scope="module")
def cli_reference() -> ModuleType:
    """The script that writes the page about the command line."""
    path = DOCS / "cli_reference.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cli_page_is_up_to_date(cli_reference: ModuleType) -> None:
    written = _text(DOCS / "reference/cli.md")
    assert written == cli_reference.page(), "options have changed: python docs/cli_reference.py"


def test_the_cli_page_has_the_options_that_help_has(capsys: pytest.CaptureFixture[str]) -> None:
    sections = re.split(r"^## rekindle ", _text(DOCS / "reference/cli.md"), flags=re.MULTILINE)[1:]
    assert len(sections) == 8
    for section in sections:
        code, out, _ = run(capsys, section.split()[0], "--help")
        assert code == 0
        in_help = set(re.findall(r"--[a-z][a-z-]*", out)) - {"--help"}
        assert set(re.findall(r"--[a-z][a-z-]*", section)) == in_help


def test_the_architecture_can_be_read_in_one_sitting() -> None:
    assert len(_text(DOCS / "explanation/architecture.md").splitlines()) <= 150
    assert len(_text(ROOT / "README.md").splitlines()) <= 120

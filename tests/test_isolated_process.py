"""Requests in processes of their own: answers, parts of answers, and processes that leave none."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.studies.isolated_process import Ended, Worker, read_json

SERVE = """
import sys, time
from rekindle.studies.isolated_process import serve

def answer(request, save):
    save({"part": request["number"]})
    if request["number"] == 2:
        time.sleep(600)
    return {"double": 2 * request["number"]}

serve(answer)
"""


@pytest.mark.slow
def test_an_answer_or_the_part_that_was_saved(tmp_path: Path) -> None:
    first, second, unused = (Worker(["-c", SERVE]) for _ in range(3))
    assert first.perform({"number": 1}, tmp_path / "1.json") == {"double": 2}
    assert read_json(tmp_path / "1.json") == {"double": 2}
    assert second.perform({"number": 2}, tmp_path / "2.json", limit_s=15.0) == {"part": 2}
    assert second.process.returncode == -9
    unused.end()
    assert unused.process.returncode is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json"]


def test_a_process_without_an_answer_says_how_it_ended(tmp_path: Path) -> None:
    worker = Worker(["-c", "import sys; print('no', flush=True); sys.exit(3)"])
    assert worker.perform({}, tmp_path / "none.json") == Ended(3, "no")
    assert read_json(tmp_path / "none.json") is None

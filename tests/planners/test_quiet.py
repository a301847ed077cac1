"""What the solver prints is held back; what others print is not."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, os
from rekindle.planners.exact.quiet import quiet

puts = ctypes.CDLL(None).puts
puts(b"before, in a buffer of C's")
with quiet():
    puts(b"HighsMipSolverData::transform tmpSolver.run();")
    puts(b"from C")
    os.write(1, b"without a buffer\\n")
    print("from Python", flush=True)
try:
    with quiet():
        puts(b"HighsMipSolverData::transform tmpSolver.run();")
        raise KeyError
except KeyError:
    print("after an error", flush=True)
puts(b"after")
"""

CLOSED = """
import os
from rekindle.planners.exact.quiet import quiet

os.close(1)
with quiet():
    os.write(2, b"it runs")
"""


def outputs(script: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.stdout, done.stderr


def test_the_solvers_line_is_held_back_and_no_other() -> None:
    out, err = outputs(SCRIPT)
    lines = out.splitlines()
    assert err == ""
    assert sorted(lines[1:4]) == ["from C", "from Python", "without a buffer"]
    assert [lines[0], *lines[4:]] == ["before, in a buffer of C's", "after an error", "after"]


def test_without_a_standard_output() -> None:
    assert outputs(CLOSED) == ("", "it runs")

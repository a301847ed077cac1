"""HiGHS runs in a process of its own, and leaves the standard output of this one alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.planners.exact.milp import IntegerProgram

PROGRAMS = """
from rekindle.planners.exact.milp import IntegerProgram

def solve(n=8, budget=3):
    program = IntegerProgram()
    drops = [program.decision(cost=1.0 + i % 3) for i in range(n)]
    program.peak_at(n, [(drop, -1) for drop in drops])
    return program.cheapest_within(budget)
"""

SOLVE_SEVERAL = """
import os, threading

def links():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            pass
    return {fd for fd, target in found if target == stdout}, dict(found)[1]

stdout = os.readlink("/proc/self/fd/1")
seen, is_done = [links()], threading.Event()

def watch():
    while not is_done.is_set():
        seen.append(links())

watcher = threading.Thread(target=watch)
watcher.start()
for n in range(4, 30):
    assert sum(solve(n, 3)) == n - 3
is_done.set()
watcher.join()
assert len(seen) > 10
assert all(each == ({1}, stdout) for each in seen), seen
"""

NOISY_HIGHSPY = """
import ctypes, importlib, sys

here = sys.path.pop(0)
del sys.modules["highspy"]
highspy = importlib.import_module("highspy")
quiet_run = highspy.Highs.run

def run(self):
    ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution")
    ctypes.CDLL(None).fflush(None)
    with open(here + "/ran", "w"):
        return quiet_run(self)

highspy.Highs.run = run
"""

IN_A_FORK = """
import os

print(sum(solve()), flush=True)
pid = os.fork()
if pid == 0:
    print(sum(solve()), flush=True)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(sum(solve()), flush=True)
"""

AFTER_A_CRASH = """
import os, signal
from rekindle.errors import PlanError

def children():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                    yield int(pid)
        except OSError:
            pass

solve()
for pid in children():
    os.kill(pid, signal.SIGKILL)
try:
    solve()
except PlanError as error:
    print("ended unexpectedly" in str(error))
print(sum(solve()))
"""


def output_of(script: str, logged: str = "") -> str:
    command = [sys.executable, "-c", PROGRAMS + script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr[: len(logged) or None]) == (0, logged)
    return done.stdout


def test_the_cheapest_within_a_budget_and_the_least_peak() -> None:
    program = IntegerProgram()
    drop_small, drop_large = program.decision(cost=1.0), program.decision(cost=3.0)
    program.peak_at(12, [(drop_small, -2), (drop_large, -5)])
    assert program.cheapest_within(10) == [True, False]
    assert program.cheapest_within(8) == [False, True]
    assert program.cheapest_within(4) is None
    assert program.least_peak() == [True, True]


def test_nothing_is_printed_and_no_file_descriptor_redirected_or_duplicated() -> None:
    assert output_of(SOLVE_SEVERAL) == ""


@pytest.mark.slow
def test_what_the_solver_prints_itself_does_not_reach_standard_output(tmp_path: Path) -> None:
    (tmp_path / "highspy.py").write_text(NOISY_HIGHSPY)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); print(sum(solve()))"
    assert output_of(script) == "5\n"
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_forked_process_has_a_solver_of_its_own() -> None:
    assert output_of(IN_A_FORK) == "5\n5\n5\n"


@pytest.mark.slow
def test_a_solver_that_ended_is_an_error_and_the_next_program_starts_another() -> None:
    logged = "planning without HiGHS, whose process ended: "
    assert output_of(AFTER_A_CRASH, logged) == "True\n5\n"

"""The solver process: solves integer programs with HiGHS until its input ends.

HiGHS 1.12 prints a line when it repairs a solution, with every log option off. It must not reach
the user's standard output, and redirecting that file descriptor would affect all threads and
forked workers of the user's process. So HiGHS runs in a process of its own, whose output is ours.

`milp` runs this file by its path: importing the package would import torch as well.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any


def main() -> None:
    """Answer pickled programs from standard input on standard output; print nothing else there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process gets it, too, and ends us
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path[:] = pickle.load(requests)
    while True:
        try:
            program = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(solve(*program), answers)
        answers.flush()


def solve(
    lp_fields: dict[str, Any], matrix_fields: dict[str, Any], options: dict[str, Any]
) -> tuple[str, list[float]]:
    """Minimise a program, given by the fields of `HighsLp` and of its column-wise matrix.

    Returns HiGHS's word for how it ended, and the values of the variables.
    """
    import highspy  # type: ignore[import-untyped]  # from the parent's sys.path

    lp = highspy.HighsLp()
    is_integer = lp_fields.pop("integrality_")
    lp.integrality_ = [highspy.HighsVarType(int(each)) for each in is_integer]
    for name, value in lp_fields.items():
        setattr(lp, name, value)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    for name, value in matrix_fields.items():
        setattr(lp.a_matrix_, name, value)
    highs = highspy.Highs()
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    highs.run()
    status = highs.modelStatusToString(highs.getModelStatus())
    return status, list(highs.getSolution().col_value)


if __name__ == "__main__":
    main()

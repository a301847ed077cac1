"""Commands as users call them: what they print where, and their exit codes."""

from __future__ import annotations

import pytest

from rekindle import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of one command."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def check_refused(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
    """The command is refused as bad input, in one line on standard error that says this."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("rekindle: "), err
    assert message in err, err
    assert err.count("\n") == 1, err

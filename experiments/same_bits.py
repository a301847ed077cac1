"""Writes src/rekindle/tracing/same_bits.json: which forms of operators compute the same bits.

    python -m experiments.same_bits [--also PYTHON]...

Every form of every operator that `lift` or `multi_tensor` could use is compared, with each of the
CPU's instruction sets, in this environment and in those of the other interpreters. A form is equal
if it is equal in all of them; it differs if it differs in one. See `rekindle.tracing.same_bits`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments import ROOT
from rekindle.rewriting import multi_tensor
from rekindle.torch_internals import OpOverload
from rekindle.tracing import operators
from rekindle.tracing.same_bits import DTYPES, OWN, Form, environment, overwrites_exactly

TABLE = ROOT / "src" / "rekindle" / "tracing" / "same_bits.json"
CAPABILITIES = ("avx512", "avx2", "default")
_FLOATS = ("f16", "bf16", "f32", "f64")
_TENSORS = (OWN, f"{OWN}()")
_MIXED = (*_FLOATS, "i64", "b8", "f32()", "f64()", "i64()")
_NUMBERS = ("float", "int")
_SPECIAL_FUNCTIONS = ("igamma", "igammac", "polygamma", "mvlgamma", "lgamma", "digamma")
_STRINGS = {"approximate": ("'none'", "'tanh'"), "rounding_mode": ("None", "'trunc'", "'floor'")}


def candidates() -> Iterator[OpOverload]:
    """Every operator of ATen that has a form to overwrite an argument, without special functions.

    Those take unbounded time for some values, and are not in the table: they run as recorded.
    """
    for name in dir(torch.ops.aten):
        if name.startswith("special_") or name in _SPECIAL_FUNCTIONS:
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in getattr(packet, "overloads", list)():
            op = getattr(packet, overload)
            is_random = torch.Tag.nondeterministic_seeded in op.tags
            forms = (operators.overwriting(op), operators.in_place(op))
            if not is_random and any(each is not None for each in forms):
                yield op


def forms_of(op: OpOverload) -> Iterator[Form]:
    """The forms of an operator to compare; not all of them exist."""
    arguments = op._schema.arguments
    n_tensors = sum("Tensor" in str(each.type) for each in arguments)
    for dtype in DTYPES:
        words = [_words(str(each.type), each.name, n_tensors, dtype) for each in arguments]
        for pattern in product(*words):
            if OWN in pattern and sum(word in _MIXED for word in pattern) <= 1:
                yield Form(str(op), " ".join(pattern), dtype)


def _words(kind: str, name: str, n_tensors: int, dtype: str) -> tuple[str, ...]:
    numbers = (*_NUMBERS, *(["complex"] if dtype.startswith("c") else []))
    optional = ("None",) if kind.startswith("Optional") else ()
    if name in _STRINGS:
        return _STRINGS[name]
    if "Tensor" in kind:
        several = _MIXED if n_tensors == 2 else ("b8", "f32()")
        mixed = tuple(each for each in several if each.removesuffix("()") != dtype)
        return (*_TENSORS, *optional, *((*mixed, *numbers) if n_tensors > 1 else ()))
    if "number" in kind:
        return (*optional, *numbers)
    return (*optional, "float") if "float" in kind else ("int",)


def every_form() -> Iterator[Form]:
    """Every form to compare."""
    for op in candidates():
        yield from forms_of(op)
    yield from multi_tensor.every_form()


def compare_all(forms: Iterable[Form]) -> dict[Form, bool]:
    """Which forms compute the same bits here; forms that do not exist are left out."""
    found: dict[Form, bool] = {}
    for form in forms:
        proof = multi_tensor.PROOFS.get(form.name, overwrites_exactly)
        verdict = proof(form)
        if verdict is not None:
            found[form] = verdict
    return found


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The table from the results of all environments."""
    verdicts: dict[Form, list[bool]] = {}
    for result in results:
        for row in result["forms"]:
            verdicts.setdefault(Form(*row[:3]), []).append(bool(row[3]))
    table: dict[str, Any] = {"made_with": [result["environment"] for result in results]}
    for verdict in ("equal", "differs"):
        rows: dict[str, dict[str, list[str]]] = {}
        for form, each in sorted(verdicts.items()):
            # Compilers make other code for complex numbers where memory may overlap: the bits
            # depend on layouts, and equality in some of them shows nothing.
            is_complex = DTYPES[form.dtype].is_complex
            is_equal = all(each) and len(each) == len(results) and not is_complex
            if is_equal if verdict == "equal" else not all(each):
                rows.setdefault(form.name, {}).setdefault(form.pattern, []).append(form.dtype)
        table[verdict] = {
            name: {pattern: " ".join(dtypes) for pattern, dtypes in patterns.items()}
            for name, patterns in rows.items()
        }
    return table


def _run(python: str, capability: str) -> dict[str, Any]:
    variables = {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [python, "-m", "experiments.same_bits", "--here"]
    printed = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # warnings about outputs that are resized, by the thousand
        check=True,
    )
    result: dict[str, Any] = json.loads(printed.stdout)
    print(python, *result["environment"], len(result["forms"]), "forms", file=sys.stderr)
    return result


def main() -> None:
    """Compare in every environment, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--also", action="append", default=[], metavar="PYTHON")
    parser.add_argument("--here", action="store_true", help="compare here, and print the result")
    given = parser.parse_args()
    if given.here:
        warnings.simplefilter("ignore")
        rows = [[*form, verdict] for form, verdict in compare_all(every_form()).items()]
        print(json.dumps({"environment": environment(), "forms": rows}))
        return
    pythons = [sys.executable, *given.also]
    table = merged([_run(*each) for each in product(pythons, CAPABILITIES)])
    Path(TABLE).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

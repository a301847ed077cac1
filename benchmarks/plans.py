"""Planners against each other: on measured profiles, on the whole zoo, and at depth; no GPU needed.

    python benchmarks/plans.py [--part targets sweep growth] [--only NAME ...] [--markdown]

targets  what each planner adds at the budgets that are held to, and how low a peak it reaches
sweep    every planner's 20-point curve on the measured profiles and on every model of the zoo:
         `auto` is to be no worse than any other at any budget, also when it starts cold there
growth   planning time of steps of 1,000, 10,000 and 50,000 ops

A part that is run takes the place of its cases in the result; those of other parts stay, each with
the commit it was made at. Times are wall-clock seconds of one run, all samples kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from common import ROOT, environment, write
from planning import PROFILES, Case, asked, capped, figures, from_file, from_zoo, in_percent, timed
from synthetic import deep_chain, deep_resnet

from rekindle import models
from rekindle.core.cost.profile import Profile
from rekindle.core.graph.graph import StepGraph
from rekindle.core.graph.schedule import Plan
from rekindle.core.graph.simulate import simulate
from rekindle.planners import auto
from rekindle.planners.bound import Bound
from rekindle.planners.chain import Chain
from rekindle.planners.curve import Curve, trade_offs
from rekindle.planners.exact import ilp
from rekindle.planners.problem import problem_of
from rekindle.planners.registry import PLANNERS

Make = Callable[[int], tuple[StepGraph, Profile]]

RESULT = ROOT / "benchmarks" / "results" / "plans.json"
OTHERS = [name for name in PLANNERS if name not in ("none", "auto", "ilp")]
GIB = 1 << 30

# Shares of the plain peak, in %, and the most time that auto is to add there, in %.
TARGETS = {
    "resnet152_b128": {75: 2.8, 60: 6.8, 50: 11.2, 40: 19.0},
    "bert-large_b32": {75: 7.0, 60: 12.0, 50: 16.0, 40: 25.0},
    "vit_b128": {50: 17.0},
    "lstm_b2048": {40: 33.0},
}
# Measured with torch.utils.checkpoint on every block, H200.
CHECKPOINT_PEAK_GIB = {"resnet152_b128": 4.87, "bert-large_b32": 10.27, "bert-large_b8": 5.82}

# The zoo's models at a batch where activations are most of the memory.
BATCHES = {
    "mlp": 4096,
    "lstm": 512,
    "resnet-tiny": 256,
    "resnet18": 128,
    "resnet50": 64,
    "resnet152": 64,
    "vit-tiny": 256,
    "vit": 64,
    "bert-tiny": 128,
    "bert-base": 16,
    "bert-large": 16,
    "gpt2-tiny": 128,
    "gpt2": 8,
}
POINTS = 20
ILP_CAP_S = 30.0
SWEEP_CAP_S = 1800.0  # one model, all planners

SIZES = (1_000, 10_000, 50_000)
DEEP: dict[str, Make] = {
    "deep_chain": deep_chain,
    "deep_resnet": lambda n_ops: deep_resnet(n_ops // 19),
}
GROWTH_CAP_S = 120.0
TOO_SLOW_S = 30.0  # a planner that took longer is not asked for the next size
REPEATS = 3
STAGES = [(auto, "problem_of"), (auto, "CutNetwork"), (auto, "Chain"), (Chain, "solve")]
STAGES += [(Bound, "added_us"), (auto, "cheapest_cut"), (auto, "fit"), (auto, "polish")]
STAGES += [(auto, "exchange"), (auto, "lower"), (auto, "write_up"), (ilp, "n_decisions")]


# --- targets


def targets(only: list[str]) -> Iterator[Case]:
    for name in sorted({*TARGETS, *CHECKPOINT_PEAK_GIB}):
        if not only or name in only:
            yield from targets_of(name)


def targets_of(name: str) -> Iterator[Case]:
    load = from_file(name)
    graph, profile = load()
    plain: Case = {"peak_bytes": simulate(graph, profile).peak_bytes, "step_us": profile.step_us}
    for percent, most in TARGETS.get(name, {}).items():
        budget_bytes = plain["peak_bytes"] * percent // 100
        runs = [
            asked(PLANNERS["auto"], *load(), budget_bytes) for _ in range(REPEATS)
        ]  # cold each time
        case: Case = {
            "model": name,
            "ops": len(graph.ops),
            "plain": plain,
            "budget_percent": percent,
            "target_percent": most,
            "auto": {**runs[0], **samples(runs)},
            "others": {other: asked(PLANNERS[other], *load(), budget_bytes) for other in OTHERS},
        }
        shown = in_percent(case["auto"], plain)
        print(
            f"{name:>15} {percent}%  auto +{shown['added']:.2f}% (target {most}%,"
            f" bound {shown['bound']:.2f}%)  {case['auto']['seconds']:.2f} s",
            flush=True,
        )
        yield case
    least = asked(PLANNERS["auto"], *load(), 1)
    checkpoint_gib = CHECKPOINT_PEAK_GIB.get(name)
    print(f"{name:>15} least {least['least_peak_bytes'] / GIB:.2f} GiB, by block {checkpoint_gib}")
    yield {"model": name, "plain": plain, "least": least, "checkpoint_peak_gib": checkpoint_gib}


# --- sweep


def sweep(only: list[str]) -> Iterator[Case]:
    assert set(BATCHES) == {spec.name for spec in models.available()}
    steps = {f"{name} ×{batch}": from_zoo(name, batch) for name, batch in BATCHES.items()}
    for path in sorted(PROFILES.glob("*_bf16_h200.json.gz")):
        name = path.name.removesuffix("_bf16_h200.json.gz")
        steps[name] = from_file(name)
    for name, load in steps.items():
        if not only or name.split(" ")[0] in only:
            graph, profile = load()
            found = capped(SWEEP_CAP_S, sweep_of, graph, profile)
            yield tell_sweep({"model": name, "ops": len(graph.ops), **found})
            gc.collect()


def sweep_of(graph: StepGraph, profile: Profile) -> Case:
    curves = {c.planner: c for c in trade_offs(graph, profile, ["auto", *OTHERS], POINTS)}
    swept = {plan.budget_bytes for plan in curves["auto"].plans}
    # Also the least peak that each of the others reaches, which lies between the sweep's budgets.
    budgets = sorted(swept | {plan.budget_bytes for c in curves.values() for plan in c.plans})
    cold = {budget: cold_auto(graph, profile, budget) for budget in budgets}
    found: Case = {
        "plain": {"peak_bytes": simulate(graph, profile).peak_bytes, "step_us": profile.step_us},
        "curves": {
            planner: {
                "seconds": round(curve.seconds, 3),
                "points": [figures(plan) for plan in curve.plans],
            }
            for planner, curve in curves.items()
        },
        "auto_cold": list(cold.values()),
        "ilp": optima(graph, profile, budgets),
    }
    known = cheapest_known(found, [c for c in curves.values() if c.planner != "auto"], budgets)
    found["violations"] = [
        {"budget_bytes": budget, "planner": planner, "added_us": us, "how": how, "auto_us": ours}
        for budget, added in known.items()
        for planner, us in added.items()
        for how, ours in (
            ("in the curve", added_at(curves["auto"], budget) if budget in swept else 0.0),
            ("cold", cold[budget].get("added_us")),
        )
        if ours is None or ours > us * (1 + 1e-9) + 1e-3
    ]
    found["bounds_refuted"] = [
        run
        for run in [*cold.values(), *found["curves"]["auto"]["points"]]
        if "bound_us" in run
        and run["bound_us"] > min(known[run["budget_bytes"]].values(), default=1e18) + 1e-3
    ]
    points = found["curves"]["auto"]["points"]
    found["is_monotone"] = all(
        larger["added_us"] <= smaller["added_us"] for larger, smaller in pairwise(points)
    )
    return found


def cold_auto(graph: StepGraph, profile: Profile, budget_bytes: int) -> Case:
    """The plan of `auto` for a budget, without earlier budgets of the same step."""

    def afresh(graph: StepGraph, profile: Profile, budget_bytes: int) -> Plan:
        return auto.Session(problem_of(graph, profile)).plan(budget_bytes)

    return asked(afresh, graph, profile, budget_bytes)


def optima(graph: StepGraph, profile: Profile, budgets: list[int]) -> list[Case]:
    """The plans of `ilp` for the budgets, if the step is small enough; stops after two failures."""
    found: list[Case] = []
    for budget_bytes in budgets:
        run = capped(ILP_CAP_S, asked, PLANNERS["ilp"], graph, profile, budget_bytes)
        found.append({"budget_bytes": budget_bytes, **run})
        if sum("error" in each for each in found) == 2:
            break
    return found


def added_at(curve: Curve, budget_bytes: int) -> float | None:
    plan = curve.at(budget_bytes)
    return None if plan is None else plan.recompute_us


def cheapest_known(
    found: Case, others: list[Curve], budgets: list[int]
) -> dict[int, dict[str, float]]:
    """For each budget: the time that each of the other planners adds there, if it gets there."""
    known: dict[int, dict[str, float]] = {budget: {} for budget in budgets}
    for budget in budgets:
        for curve in others:
            if (us := added_at(curve, budget)) is not None:
                known[budget][curve.planner] = us
    for run in found["ilp"]:
        if "added_us" in run:
            known[run["budget_bytes"]]["ilp"] = run["added_us"]
    return known


def tell_sweep(found: Case) -> Case:
    name = f"{found['model']:>16} {found['ops']:>5} ops"
    if "error" in found:
        print(f"{name}  {found['error']}", flush=True)
        return found
    cold = [run["seconds"] for run in found["auto_cold"]]
    print(
        f"{name}  {len(found['violations'])} violations,"
        f" {len(found['bounds_refuted'])} bounds refuted, monotone {found['is_monotone']};"
        f" curve {found['curves']['auto']['seconds']:.1f} s, cold ≤ {max(cold):.1f} s,"
        f" mutwo's curve {found['curves']['mutwo']['seconds']:.1f} s,"
        f" ilp at {sum('added_us' in run for run in found['ilp'])} budgets",
        flush=True,
    )
    for each in found["violations"]:
        print("   ", each, flush=True)
    return found


# --- growth


def growth(only: list[str]) -> Iterator[Case]:
    for shape, make in DEEP.items():
        if only and shape not in only:
            continue
        skipped: set[str] = set()
        for n_ops in SIZES:
            graph, profile = make(n_ops)
            peak_bytes = simulate(graph, profile).peak_bytes
            plain = {"peak_bytes": peak_bytes, "step_us": profile.step_us}
            about = {"model": shape, "ops": len(graph.ops), "plain": plain}
            for planner in ["auto", *OTHERS]:
                if planner in skipped:
                    yield tell_growth({**about, "planner": planner, "error": "slow before"})
                    continue
                case = repeated(planner, make, n_ops, peak_bytes // 2)
                if "error" in case or case["seconds"] > TOO_SLOW_S:
                    skipped.add(planner)
                yield tell_growth({**about, "planner": planner, **case})
            if n_ops == 10_000:
                case = capped(3 * GROWTH_CAP_S, whole_curve, make, n_ops)
                yield tell_growth({**about, "planner": "auto, 20 points", **case})


def repeated(planner: str, make: Make, n_ops: int, budget_bytes: int) -> Case:
    """The figures of a planner at a budget, the least of its times, and all of them."""
    case = capped(GROWTH_CAP_S, alone, planner, make, n_ops, budget_bytes)
    if "error" in case:
        return case
    runs = [case]
    for _ in range(REPEATS - 1 if case["seconds"] < TOO_SLOW_S else 0):
        runs.append(capped(GROWTH_CAP_S, alone, planner, make, n_ops, budget_bytes))
    return {**case, **samples([run for run in runs if "error" not in run])}


def samples(runs: list[Case]) -> Case:
    """The least of the times of some runs, and all of them."""
    walls, cpus = [run["seconds"] for run in runs], [run["cpu_s"] for run in runs]
    return {"seconds": min(walls), "samples_s": walls, "cpu_s": min(cpus), "samples_cpu_s": cpus}


def alone(planner: str, make: Make, n_ops: int, budget_bytes: int) -> Case:
    """One planner on a step that nothing has looked at yet; of auto, the seconds by stage too."""
    graph, profile = make(n_ops)
    if planner != "auto":
        return asked(PLANNERS[planner], graph, profile, budget_bytes)
    spent: dict[str, float] = {}
    for owner, name in STAGES:
        setattr(owner, name, timed(getattr(owner, name), name, spent))
    case = asked(PLANNERS[planner], graph, profile, budget_bytes)
    return {**case, "stages_s": {name: round(seconds, 3) for name, seconds in spent.items()}}


def whole_curve(make: Make, n_ops: int) -> Case:
    graph, profile = make(n_ops)
    started_cpu = time.process_time()
    (curve,) = trade_offs(graph, profile, ["auto"], POINTS)
    cpu_s = round(time.process_time() - started_cpu, 3)
    points = [figures(plan) for plan in curve.plans]
    return {"seconds": round(curve.seconds, 3), "cpu_s": cpu_s, "points": points}


def tell_growth(case: Case) -> Case:
    said = case.get("error") or f"{case['seconds']:.2f} s, {case['cpu_s']:.2f} on the CPU"
    if "added_us" in case or "least_peak_bytes" in case:
        said += "".join(
            f"  {name} {value:.1f}%" for name, value in in_percent(case, case["plain"]).items()
        )
    print(f"{case['model']:>12} {case['ops']:>6} ops  {case['planner']:<15} {said}", flush=True)
    if "stages_s" in case:
        print(f"{'':>28}{case['stages_s']}", flush=True)
    return case


# --- tables


def markdown(cases: list[Case]) -> None:
    """The targets and the growth as tables to paste."""
    print("\n| model | budget | target | `auto` adds | bound | gap | peak | seconds | the others |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        if case["part"] != "targets" or "auto" not in case:
            continue
        plain, walls = case["plain"], case["auto"]["samples_s"]
        shown = in_percent(case["auto"], plain)
        others = {name: in_percent(run, plain) for name, run in case["others"].items()}
        said = ", ".join(
            f"`{name}` {run['added']:.1f}%" if "added" in run else f"`{name}` ≥ {run['least']:.0f}%"
            for name, run in others.items()
        )
        print(
            f"| {case['model']} | {case['budget_percent']}% | {case['target_percent']}%"
            f" | {shown['added']:.2f}% | {shown['bound']:.2f}%"
            f" | {100 * (1 - shown['bound'] / shown['added']):.1f}% | {shown['peak']:.1f}%"
            f" | {min(walls):.1f} (median {statistics.median(walls):.1f}) | {said} |"
        )
    print("\n(≥: infeasible, with the least peak it reaches.)\n")
    print("| model | least peak of `auto` | checkpoint on every block |\n|---|---|---|")
    for case in cases:
        if case["part"] == "targets" and "least" in case:
            least = case["least"]["least_peak_bytes"]
            share = 100 * least / case["plain"]["peak_bytes"]
            by_block = case["checkpoint_peak_gib"]
            told = f"{by_block} GiB" if by_block else ""
            print(f"| {case['model']} | {least / GIB:.2f} GiB ({share:.0f}%) | {told} |")
    grown = [case for case in cases if case["part"] == "growth"]
    sizes = sorted({(case["model"], case["ops"]) for case in grown})
    print("\n| seconds | " + " | ".join(f"{name} {ops}" for name, ops in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for planner in dict.fromkeys(case["planner"] for case in grown):
        row = {(c["model"], c["ops"]): c for c in grown if c["planner"] == planner}
        cells = [row.get(size, {"error": ""}) for size in sizes]
        told = " | ".join(f"{c['seconds']:.2f}" if "seconds" in c else c["error"] for c in cells)
        print(f"| `{planner}` | {told} |")


PARTS: dict[str, Callable[[list[str]], Iterator[Case]]] = {
    "targets": targets,
    "sweep": sweep,
    "growth": growth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", nargs="+", default=[], help="models, profiles or shapes")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--markdown", action="store_true", help="print tables at the end")
    options = parser.parse_args()
    commit = environment()["commit"]
    before = json.loads(options.out.read_text())["cases"] if options.out.exists() else []
    done: list[Case] = []
    try:
        for part in options.part:
            for case in PARTS[part](options.only):
                done.append({"part": part, "commit": commit, **case})
    finally:  # what is done is kept, also when interrupted
        names = {(case["part"], case["model"]) for case in done}
        done += [case for case in before if (case["part"], case["model"]) not in names]
        done.sort(key=lambda case: list(PARTS).index(case["part"]))
        write(options.out, "plans", done)
    if options.markdown:
        markdown(done)


if __name__ == "__main__":
    main()

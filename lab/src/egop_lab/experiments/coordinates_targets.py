"""The targets of the comparison of coordinates, each judged from the records; missing runs are named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from egop_lab.experiments.base import Judgement, to_verdict
from egop_lab.experiments.coordinates_found import (
    ADAMW,
    CHOSEN,
    LARGE_GPT,
    MUON,
    NORMUON,
    RESNET,
    SMALL_GPT,
    SOAP,
    VIT,
    Found,
    final,
    unit,
)
from egop_lab.experiments.curves import median
from egop_lab.experiments.timed_experiment import format_number, lowest_loss

RULE = 0.03  # how far from its own best loss EGOP may be with a rate that follows from AdamW's

Decided = tuple[bool, str]  # whether a target is met, and the numbers in a sentence


def judged(found: Found, id: str) -> list[Judgement]:
    """Judge all targets."""
    results = []
    for name, words, decide in _targets(found):
        try:
            if SMALL_GPT not in found.tasks:
                raise LookupError("this preset has other tasks")
            holds, said = decide()
        except LookupError as error:
            results.append(Judgement(f"{id}/{name}", words, "cannot be judged", f"Not there: {error}.", "target"))
        else:
            results.append(Judgement(f"{id}/{name}", words, to_verdict(holds), said, "target"))
    return results


def _targets(found: Found) -> Iterator[tuple[str, str, Callable[[], Decided]]]:
    yield (
        "steps",
        f"Target: on {SMALL_GPT} EGOP reaches AdamW's last loss in at most 0.42 of its steps.",
        partial(_steps, found, SMALL_GPT, 0.42),
    )
    yield (
        "time",
        f"Target: on {SMALL_GPT} EGOP reaches AdamW's last loss in at most 0.55 of its time.",
        partial(_time, found, SMALL_GPT, 0.55),
    )
    for task, short in ((SMALL_GPT, "small"), (LARGE_GPT, "large")):
        for rival in (MUON, NORMUON):
            yield (
                f"{short}-{rival.lower()}",
                f"Target: on {task} EGOP ends lower than {rival} with every seed.",
                partial(_every_seed, found, task, rival),
            )
    yield (
        "resnet-soap",
        f"Target: on {RESNET} EGOP's lowest validation loss is not higher than SOAP's.",
        partial(_lowest, found, RESNET, SOAP),
    )
    for rival in (MUON, SOAP):
        yield (
            f"vit-{rival.lower()}",
            f"Target: on {VIT} EGOP is not less accurate than {rival}.",
            partial(_accuracy, found, VIT, rival),
        )
    for name, task, rival, most in (
        ("small-step", SMALL_GPT, ADAMW, 1.25),
        ("small-step-muon", SMALL_GPT, MUON, 1.08),
        ("large-step-muon", LARGE_GPT, MUON, 1.15),
        ("resnet-step", RESNET, ADAMW, 1.5),
        ("resnet-step-eager", RESNET, ADAMW, 1.15),
    ):
        eager = name.endswith("eager")
        words = f"Target: on {task} a whole step of EGOP takes at most {most:g} times {rival}'s"
        words += ", without a CUDA graph of the network." if eager else "."
        yield name, words, partial(_step, found, task, rival, most, eager)
    yield (
        "rule",
        f"Target: one factor from AdamW's learning rate to EGOP's ends within {RULE:g} of EGOP's best on every task.",
        partial(_rule, found),
    )


def to_goal(found: Found, task: str, method: str) -> tuple[float, float]:
    """Return AdamW's final loss, and a method's steps or epochs to it; for AdamW itself all of them."""
    goal = found.loss(task, ADAMW)
    return goal, float(found.length(task)) if method == ADAMW else found.steps_to(task, method, goal)


def _steps(found: Found, task: str, most: float) -> Decided:
    goal, steps = to_goal(found, task, CHOSEN)
    length, unit_ = found.length(task), unit(found.tasks[task])
    last = found.loss(task, CHOSEN)
    said = (
        f"AdamW ends at {goal:.3f} after {length} {unit_}; EGOP is there after {format_number(steps, 4)} "
        f"({format_number(steps / length, 2)}), in the middle of a schedule of {length}. "
    )
    try:
        times = found.multiple(task, last)
        needed = f"{times:.2f}" if math.isfinite(times) else f"more than {found.settings['multiples'][-1]:g}"
        said += f"Finished runs: for EGOP's last loss, {last:.3f}, AdamW needs {needed} times the {unit_}."
    except LookupError:
        said += f"EGOP ends at {last:.3f}; AdamW's longer runs are not there."
    return steps <= most * length, said


def _time(found: Found, task: str, most: float) -> Decided:
    steps = to_goal(found, task, CHOSEN)[1]
    one, other = found.seconds_to(task, CHOSEN, steps), found.seconds_to(task, ADAMW, found.length(task))
    return (
        one <= most * other,
        f"AdamW {other:.3g} seconds, EGOP {format_number(one, 3)} ({format_number(one / other, 2)}).",
    )


def _every_seed(found: Found, task: str, rival: str) -> Decided:
    own, others = ([final(run.result) for run in found.reported(task, name)] for name in (CHOSEN, rival))
    pairs = list(zip(own, others, strict=True))
    return all(one < other for one, other in pairs), f"EGOP {_listed(own)}; {rival} {_listed(others)}."


def _lowest(found: Found, task: str, rival: str) -> Decided:
    one, other = (median([lowest_loss(run.result) for run in found.reported(task, name)]) for name in (CHOSEN, rival))
    last = f"at the end {found.loss(task, CHOSEN):.3f} and {found.loss(task, rival):.3f}"
    return one <= other, f"EGOP {one:.3f}, {rival} {other:.3f}; {last}."


def accuracy(found: Found, task: str, method: str) -> float:
    """Return the median final accuracy."""
    return -median([-float(run.result["accuracy"][-1]) for run in found.reported(task, method)])


def _accuracy(found: Found, task: str, rival: str) -> Decided:
    one, other = accuracy(found, task, CHOSEN), accuracy(found, task, rival)
    return one >= other, f"EGOP {one:.3f}, {rival} {other:.3f}."


def _step(found: Found, task: str, rival: str, most: float, eager: bool) -> Decided:
    one, other = (found.step(task, name, eager)[1] for name in (CHOSEN, rival))
    return one <= most * other, f"EGOP {1000 * one:.2f} ms, {rival} {1000 * other:.2f} ms, {one / other:.2f} times."


def _rule(found: Found) -> Decided:
    """Return the factor with the smallest worst distance from EGOP's best loss, of those tried on all tasks."""
    distances: dict[float, list[float]] = {}
    for task in (SMALL_GPT, LARGE_GPT, RESNET, VIT):
        rate = found.rate(task, ADAMW)
        losses = _by_rate(found, task)
        if len(losses) < 3:
            raise LookupError(f"{task}: EGOP has whole runs with {len(losses)} learning rates")
        for tried, loss in losses.items():
            distances.setdefault(tried / rate, []).append(loss - min(losses.values()))
    everywhere = {factor: max(each) for factor, each in distances.items() if len(each) == 4}
    if not everywhere:
        return False, "No factor was tried on all tasks."
    best = min(everywhere, key=lambda factor: everywhere[factor])
    return everywhere[best] <= RULE, f"With {best:g} times AdamW's rate it is at most {everywhere[best]:.3f} worse."


def _by_rate(found: Found, task: str) -> dict[float, float]:
    """Return EGOP's final loss with each learning rate, for the trial with which most were tried."""
    trials: dict[int, dict[float, float]] = {}
    for run in found.trainings(task, CHOSEN, 1.0):
        trials.setdefault(run.config["seed"], {})[run.config["lr"]] = final(run.result)
    return max(trials.values(), key=len, default={})


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)

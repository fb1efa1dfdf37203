"""Bases × coordinates: which optimizer in which coordinates, beside AdamW, Muon, NorMuon and SOAP, on four tasks."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from egop_lab.builders import ADAM, REFRESH_EVERY, import_pytorch_optimizer
from egop_lab.data import images, text
from egop_lab.experiments import coordinates_pictures, coordinates_targets
from egop_lab.experiments.base import Experiment, Judgement, Table
from egop_lab.experiments.coordinates_found import (
    ADAMW,
    CHOSEN,
    GRID,
    LARGE_GPT,
    MUON,
    RESNET,
    RIVALS,
    SMALL_GPT,
    SOAP,
    VIT,
    Found,
    as_last,
    unit,
)
from egop_lab.methods import cell
from egop_lab.plots.picture import Picture
from egop_lab.training.context import Context, Preset, make_record
from egop_lab.training.coordinates import ImageRun, LanguageRun, step_times
from egop_lab.training.language import BETAS
from egop_lab.training.records import Store
from egop_lab.training.sweeps import TUNING
from egop_lab.training.timed_runs import Run, Trials, describe_precision, fast_math

PHASES = ("scouting", "trainings", "times", "rule")
_SCHEDULE = {"warm-up": 50, "decay": 0.4, "samples": 32}
_TEXT = {"network": "GPT", "context": 256, "weight decay": 0.1, "interval": 20, "windows": 512, "steps": 400}
_TEXT |= _SCHEDULE
_IMAGES = {"batch": 128, "side": 112, "crop": 96, "begin": -1, **_SCHEDULE}  # at half the rates
_FULL: dict[str, dict[str, Any]] = {
    SMALL_GPT: {"layers": 6, "width": 384, "heads": 6, "batch": 64, "rates": [1e-3, 2e-3, 4e-3], **_TEXT},
    LARGE_GPT: {"layers": 12, "width": 768, "heads": 12, "batch": 32, **_TEXT},
    RESNET: {"network": "residual", "depths": [3, 4, 6, 3], "width": 64, "weight decay": 1e-4, "epochs": 10, **_IMAGES},
    VIT: {"network": "transformer", "patch": 8, "layers": 6, "width": 384, "heads": 6, "hidden": 1024}
    | {"weight decay": 0.1, "epochs": 16, **_IMAGES},
}
_EAGER = {RESNET: [False, True]}  # also without the CUDA graph: convolutions are launched one by one by most people
_TINY = {"batch": 8, "warm-up": 4, "samples": 2}
_QUICK: dict[str, dict[str, Any]] = {
    "tiny GPT": {**_FULL[SMALL_GPT], "layers": 1, "width": 32, "heads": 2, "context": 32, "windows": 32}
    | {"interval": 10, "steps": 40, "rates": [2e-3, 8e-3, 3.2e-2], **_TINY},
    "tiny ViT": {**_FULL[VIT], "layers": 1, "width": 16, "heads": 2, "hidden": 32, "side": 20, "crop": 16}
    | {"made": [64, 32], "epochs": 4, **_TINY},
}
_QUICK_CELLS = [(base, kind) for base in ("Sign", "PolarAdam") for kind in ("original", "online smaller")]


class CoordinatesExperiment(Experiment):
    """The whole grid on a small language model; its best cells, their controls and the rivals on three more tasks."""

    id: ClassVar[str] = "coordinates"
    title: ClassVar[str] = "Which optimizer in which coordinates"
    figures: ClassVar[str] = "nothing like it; a further comparison, with targets of this project"

    def settings(self, preset: Preset) -> dict[str, Any]:
        full = preset == "full"
        cells = GRID if full else [ADAMW, *(cell(*pair) for pair in _QUICK_CELLS)]
        return {
            "tasks": _FULL if full else _QUICK,
            "methods": [*cells, *(RIVALS if full else (MUON, SOAP))],
            "best": 6 if full else 1,
            "trials": 3 if full else 1,
            "scouting length": 0.5,
            "multiples": [1.5, 2.0, 3.0] if full else [2.0],
            "multiples elsewhere": "AdamW's longer runs have one trial, not three, on the tasks after the first",
            "ladder": [6.25e-5 * 2**power for power in range(11)] if full else [2e-3, 8e-3, 3.2e-2],
            "timing": {"rounds": 2, "warm": 64, "timed": 60} if full else {"rounds": 1, "warm": 2, "timed": 2},
            "rate": "lowest last validation loss on one trial of its own; while it is at an end of the rates tried, "
            "the next one of the ladder is tried too. Every cell of the grid by short runs (scouting length); the "
            "finalists, which are run on all tasks, by whole runs around that rate, each task for itself",
            "schedule": "warm-up over so many steps, then constant, linear to nearly 0 over the last part (decay); the "
            "same for shorter and longer runs",
            "weights": "the base steps the blocks' weights and first layers; AdamW embeddings, head, norms and biases, "
            "with every method but SOAP, which takes everything",
            "betas": f"AdamW {BETAS} in GPTs, {ADAM} in image networks; all others have their own",
            "renewal": f"online bases and SOAP's after {REFRESH_EVERY} steps, aligned ones every step",
            "left out": "PolarAdam, aligned: it offers no map of its momentum to align to",
            "finalists": "AdamW, EGOP as people type it, the rivals, the best cells by the short runs, and the same "
            "bases in original coordinates",
            "times": "measured apart from the trainings, in rounds in which the methods take turns; on a GPU the "
            "network is replayed as a CUDA graph",
        }

    def run(
        self,
        store: Store,
        context: Context,
        *,
        tasks: Sequence[str] | None = None,
        methods: Sequence[str] | None = None,
        phases: Sequence[str] = PHASES,
    ) -> None:
        """Do the runs that the store does not have yet: task by task, then those for the rule of learning rates.

        Several processes may train at once, each other methods and with a store of its own (see
        :func:`egop_lab.training.records.merge`); times are to be measured by one process alone. The tasks after the
        first need its results: each process then has to begin with a merged store.

        Args:
            store: where finished runs are.
            context: preset, device, data, time.
            tasks: which ones; all by default.
            methods: which ones; all by default.
            phases: what is done of each, of :data:`PHASES`.
        """
        settings = self.settings(context.preset)
        if SOAP in settings["methods"]:
            import_pytorch_optimizer(SOAP)  # which takes seconds to import
        names = list(tasks or settings["tasks"])
        ends = None if context.time_budget is None else time.monotonic() + context.time_budget
        # One after the other, lazily: what a task does may depend on what those before it have found.
        with fast_math(context.device):
            works = [(name, [phase for phase in phases if phase != "rule"]) for name in names]
            works += [(name, [phase for phase in phases if phase == "rule"]) for name in names]
            for name, parts in works:
                left = None if ends is None else ends - time.monotonic()
                if parts and not self._work(name, store, replace(context, time_budget=left), methods, parts):
                    return

    def _work(
        self, task: str, store: Store, context: Context, methods: Sequence[str] | None, phases: Sequence[str]
    ) -> bool:
        """Run some phases of a task; return True if all runs of this process are done."""
        trials, make = self.trials(task, store, context)
        found = functools.partial(self._found, store, trials, task)
        settings = self.settings(context.preset)
        scouts = task == found().grid and "scouting" in phases
        if scouts and not _scout(trials, found, _of(settings["methods"], methods)):
            return False
        try:
            return self._finish(task, trials, make, found, methods, phases)
        except LookupError as error:  # what the first task has to say first
            context.say(f"{task} has to wait: {error}")
            return False

    def _finish(
        self,
        task: str,
        trials: Trials,
        make: Callable[[dict[str, Any]], Run],
        found: Callable[[], Found],
        methods: Sequence[str] | None,
        phases: Sequence[str],
    ) -> bool:
        own = _of(found().methods(task), methods)
        done = {"scouting": lambda: True}
        # Method by method, the first ones being those that all others are compared with.
        done["trainings"] = lambda: all(_train(trials, found, task, method) for method in own)
        done["times"] = lambda: all(self._time(trials, make, own, eager) for eager in _EAGER.get(task, [False]))
        done["rule"] = lambda: CHOSEN not in own or _try_rates(trials, found, task)
        return all(done[phase]() for phase in phases)

    def _found(self, store: Store, trials: Trials, task: str) -> Found:
        """Return the findings so far: of the task its runs with the same settings, of the first task all runs."""
        settings = self.settings(trials.context.preset)
        others = as_last(self.records(store, trials.context.preset), list(settings["tasks"]))
        return Found(settings, others | {task: trials.done})

    def trials(self, task: str, store: Store, context: Context) -> tuple[Trials, Callable[[dict[str, Any]], Run]]:
        """Return the series of runs of a task, and the function that makes a run of a configuration."""
        settings, device = self.settings(context.preset)["tasks"][task], context.device
        make: Callable[[dict[str, Any]], Run]
        summary: dict[str, Any]
        if settings["network"] == "GPT":
            contents = text.load(context.data, device, smallest=10 * settings["batch"] * settings["context"])
            make, summary = functools.partial(_language, contents, device), contents.summary
        else:
            held = _images(context.data, settings["side"], settings["crop"], *settings.get("made", ()), device=device)
            make, summary = functools.partial(_image, held, device), held.counts
        own = {key: value for key, value in settings.items() if key not in ("rates", "begin", "steps", "epochs")}
        common = self.config(context.preset, task=task, **own, data=summary, precision=describe_precision(device))
        return Trials(store, context, lambda **entries: common | entries, make, lambda config: None), make

    def _time(self, trials: Trials, make: Callable[[dict[str, Any]], Run], methods: Sequence[str], eager: bool) -> bool:
        """Time the steps of methods that are not timed yet; eager ones without a CUDA graph of the network."""
        store, context = trials.store, trials.context
        common = trials.make_config()
        settings = self.settings(context.preset)
        task = settings["tasks"][common["task"]]
        timing = settings["timing"] | {"lr": 1e-3, "seed": 0, unit(task): task[unit(task)]}
        timing |= {"eager": True} if eager else {}
        configs = {method: common | timing | {"method": method} for method in methods}
        left = {method: config for method, config in configs.items() if config not in store}
        if not left:
            return True
        if context.time_budget is not None and context.time_budget <= 0:
            return False
        began = time.perf_counter()
        runs = {method: functools.partial(make, config) for method, config in left.items()}
        results = step_times(runs, settings["timing"])
        seconds = (time.perf_counter() - began) / len(left)
        store.add(*(make_record(left[method], result, seconds, context.device) for method, result in results.items()))
        return True

    def judge(self, store: Store, preset: Preset) -> list[Judgement]:
        return coordinates_targets.judged(self.found(store, preset), self.id)

    def pictures(self, store: Store, preset: Preset) -> list[Picture]:
        return coordinates_pictures.pictures(self.found(store, preset))

    def tables(self, store: Store, preset: Preset) -> list[Table]:
        return coordinates_pictures.tables(self.found(store, preset))

    def found(self, store: Store, preset: Preset) -> Found:
        """Return the findings of the records."""
        settings = self.settings(preset)
        return Found(settings, as_last(self.records(store, preset), list(settings["tasks"])))


def _of(all_: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """Return the wanted items; all if nothing is said."""
    return [method for method in all_ if wanted is None or method in wanted]


def _scout(trials: Trials, found: Callable[[], Found], methods: Sequence[str]) -> bool:
    """Do the short runs of the first task that choose learning rates and finalists; return True if all are done."""
    return all(_search(trials, found, found().grid, method, "scouting length") for method in methods)


def _search(trials: Trials, found: Callable[[], Found], task: str, method: str, short: str | None = None) -> bool:
    """Try learning rates as long as the search asks for some; return True if it ended, False if the time is over."""
    length = found().length(task, 1.0 if short is None else found().settings[short])
    entries = {"method": method, unit(found().tasks[task]): length, "seed": TUNING}
    while left := (found().search(task, method) if short is None else found().scouted(method))[1]:
        if not all(trials.do(**entries, lr=rate) for rate in left):
            return False
    return True


def _train(trials: Trials, found: Callable[[], Found], task: str, method: str) -> bool:
    """Do the full runs that choose a finalist's learning rate, then the reported ones; return True if all are done."""
    if method in found().finalists and not _search(trials, found, task, method):
        return False
    known = found()
    rate, where = known.rate(task, method), unit(known.tasks[task])
    return all(
        trials.do(method=method, **{where: known.length(task, multiple)}, lr=rate, seed=seed)
        for multiple in (1.0, *(known.settings["multiples"] if method == ADAMW else ()))
        for seed in range(known.seeds(task, multiple))
    )


def _try_rates(trials: Trials, found: Callable[[], Found], task: str) -> bool:
    """Run EGOP with more rates around its best one than tuning tries; return True if all are done."""
    known = found()
    entries = {"method": CHOSEN, unit(known.tasks[task]): known.length(task), "seed": TUNING}
    best = known.rate(task, CHOSEN)
    return all(trials.do(**entries, lr=rate) for rate in known.settings["ladder"] if best / 4 <= rate <= best * 4)


def _language(contents: text.Text, device: torch.device, config: dict[str, Any]) -> Run:
    return LanguageRun(contents, config, device)


def _image(held: images.Images, device: torch.device, config: dict[str, Any]) -> Run:
    return ImageRun(held, config, device)


@functools.lru_cache(maxsize=1)
def _images(folder: str | None, side: int, crop: int, *made: int, device: torch.device) -> images.Images:
    """Load the images of a folder; for the quick preset, make some: noise, brighter in one colour."""
    if not made:
        return images.load(folder, side=side, crop=crop, device=device)
    return images.HeldImages(*(_noise(count, side, device) for count in made), crop=crop)


def _noise(count: int, side: int, device: torch.device) -> images.Batch:
    generator = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 100, (count, 3, side, side), generator=generator)
    pixels[torch.arange(count), labels] += 150
    return pixels.to(device, torch.uint8), labels.to(device)

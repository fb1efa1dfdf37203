"""Tasks of the race, and the hyper-parameters that identify a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TUNING_SEEDS = (10000, 10001, 10002)
CLIPS = (None, 1.0)  # largest gradient norm: the base value, and the one that is tried against it
DECAY = 0.4  # part of the run over which the learning rate falls to 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Attributes:
        task: name of the task.
        method: name of the method.
        steps: length of the run.
        seed: of the initialisation and of the batches; the same for all methods.
        rate: place of the learning rate on the grid, see :attr:`lr`.
        beta: the method's decay that is tuned: AdamW's and SOAP's beta2, Muon's and NorMuon's momentum.
        warmup: steps over which the learning rate rises.
        clip: largest gradient norm; None for no clipping.
    """

    task: str
    method: str
    steps: int
    seed: int
    rate: int
    beta: float
    warmup: int
    clip: float | None

    @property
    def lr(self) -> float:
        """Learning rate, on a grid of factors of the square root of two."""
        return 1e-3 * 2 ** (self.rate / 2)

    @property
    def is_tuning(self) -> bool:
        """Whether the run is for tuning: only the others are evaluated on the test part."""
        return self.seed in TUNING_SEEDS


# The base value of each method's tuned decay on text, and the one that is tried against it. The outside AdamW keeps
# (0.9, 0.95) in every arm but AdamW's own, where it is the whole optimizer.
TEXT_BETAS = {"AdamW": (0.95, 0.99), "Muon": (0.95, 0.9), "NorMuon": (0.95, 0.9), "SOAP": (0.95, 0.99)}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and where tuning starts.

    Attributes:
        name: as in records. Give a task a new name when a setting changes that changes its results.
        data: ``"wikitext-2"``, or ``"synthetic"`` for tests.
        model: sizes of the model.
        batch: windows (or images) in a batch.
        steps: length of a run.
        seeds: how many final runs each method gets.
        guesses: by method, the place of the learning rate on the grid at which tuning starts.
        betas: by method, the two values of its tuned decay, the base value first.
        warmups: the two values of the warm-up in steps, the base value first.
        beta2: AdamW's, for the parameters that the method itself does not step.
        weight_decay: decoupled, for all parameters.
        multiples: further lengths at which AdamW runs, as multiples of ``steps``.
        evaluations: how many times a run is evaluated on the validation part.
        windows: how many validation windows are used for that; the end of a run is evaluated on all.
        step_seconds: rough time of a step on an H200, to plan the first runs of a slice.
    """

    name: str
    data: str
    model: Mapping[str, int]
    batch: int
    steps: int
    seeds: int
    guesses: Mapping[str, int]
    betas: Mapping[str, tuple[float, float]] = field(default_factory=lambda: TEXT_BETAS)
    warmups: tuple[int, int] = (50, 100)
    beta2: float = 0.95
    weight_decay: float = 0.1
    multiples: tuple[float, ...] = (1.5, 2.0, 3.0)
    evaluations: int = 10
    windows: int = 512
    time_steps: float = 0.01

    def length(self, multiple: float) -> int:
        """Return the number of steps of a run that is a multiple as long."""
        return round(self.steps * multiple)


_SMALL: dict[str, Any] = {"layers": 6, "width": 384, "heads": 6, "context": 256}
_LARGE: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12, "context": 256}
_TINY: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "context": 16}

TASKS = {
    task.name: task
    for task in (
        Task(
            name="gpt-6x384-400",
            data="wikitext-2",
            model=_SMALL,
            batch=64,
            steps=400,
            seeds=8,
            guesses={"AdamW": 2, "Muon": 5, "NorMuon": 4, "SOAP": 4},
        ),
        Task(
            name="gpt-6x384-1600",
            data="wikitext-2",
            model=_SMALL,
            batch=64,
            steps=1600,
            seeds=8,
            guesses={"AdamW": 2, "Muon": 4, "NorMuon": 3, "SOAP": 3},
        ),
        Task(
            name="gpt-12x768-400",
            data="wikitext-2",
            model=_LARGE,
            batch=32,
            steps=400,
            seeds=5,
            guesses={"AdamW": -1, "Muon": 3, "NorMuon": 2, "SOAP": 3},
            time_steps=0.025,
        ),
        Task(  # for tests: seconds on a CPU
            name="tiny",
            data="synthetic",
            model=_TINY,
            batch=8,
            steps=12,
            seeds=2,
            guesses={"AdamW": 13, "Muon": 15, "NorMuon": 15, "SOAP": 14},
            warmups=(2, 4),
            multiples=(1.5,),
            evaluations=3,
            windows=16,
        ),
    )
}
# Still to come, with the settings of the earlier race (batch 128, crops of 96 from 112 pixels, outside beta2 0.99 with
# 0.999 tried against it): ResNet-34 (depths 3-4-6-3, width 64, weight decay 1e-4, 10 epochs of 73 steps; best rates of
# the earlier tuning: AdamW 0, Muon 6, NorMuon 6, SOAP 4) and ViT (patch 8, 6 layers, width 384, 6 heads, hidden 1024,
# weight decay 0.1, 16 epochs; AdamW -4, Muon 2, NorMuon 2, SOAP 2); and GPT 124M on tokens (12 layers, width 768,
# context 1,024, vocabulary 32,768, untied head, 64 windows a batch, 573 steps, 3 seeds).

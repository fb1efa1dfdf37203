"""Tasks of the race, and the hyper-parameters that identify a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RIVALS = ("AdamW", "Muon", "NorMuon", "SOAP", "SGD")
TUNING_SEEDS = (10000, 10001, 10002)
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
        beta: the method's decay that is tuned: the momentum of Muon, NorMuon and SGD, beta2 of the others.
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


# The base value of each method's tuned decay, and the one that is tried against it. The outside AdamW keeps the task's
# beta2 in every arm but AdamW's own, where it is the whole optimizer.
MUON_SIZED = "Muon, EGOP's sizes"
ADAMW_OUTSIDE = "AdamW, outside rate x 4"
_MATRICES = dict.fromkeys(("Muon", "NorMuon", MUON_SIZED), (0.95, 0.9))
VARIANTS = (
    "EGOP, squared momentum",
    "EGOP, momentum 0.95",
    "EGOP, both sides",
    "EGOP, renewed every 20 steps",
)
_ADAMS = ("AdamW", ADAMW_OUTSIDE, "SOAP", "PolarAdam", "EGOP", "EGOP, random rotation", *VARIANTS)
_METHODS = (*_ADAMS, *_MATRICES, "SGD")
TEXT_BETAS = {**dict.fromkeys(_ADAMS, (0.95, 0.99)), **_MATRICES}
IMAGE_BETAS = {**dict.fromkeys(_ADAMS, (0.99, 0.999)), **_MATRICES, "SGD": (0.9, 0.95)}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and where tuning starts.

    Of a hyper-parameter that has one value only, no other is tried.

    Attributes:
        name: as in records. Give a task a new name when a setting changes that changes its results.
        data: ``"wikitext-2"``, ``"code"`` or ``"imagenette"``, or ``"synthetic"`` for tests.
        network: ``"gpt"``, ``"resnet"`` or ``"vit"``.
        model: arguments of the model.
        batch: windows or images in a batch.
        steps: length of a run.
        seeds: how many final runs each method gets.
        guesses: by method, the place of the learning rate on the grid at which tuning starts.
        betas: by method, the values of its tuned decay, the base value first.
        warmups: by method, the values of the warm-up in steps, the base value first.
        clips: the values of the largest gradient norm, the base value first.
        room: how many tried rates the best one must have on both sides.
        tuning_steps: length of tuning runs, if they are shorter.
        tuning_seeds: how many tuning seeds each setting gets.
        controls: methods that are not tuned, with the method whose tuned values they run with.
        beta2: AdamW's, for the parameters that the method itself does not step.
        weight_decay: decoupled, for all parameters.
        multiples: further lengths at which AdamW runs, as multiples of ``steps``.
        evaluations: how many times a run is evaluated on the validation part.
        windows: how many validation windows are used for that; the end of a run is evaluated on all.
        crop: side of the images that the model sees.
        compiled: train with ``torch.compile`` rather than with a CUDA graph.
    """

    name: str
    data: str
    network: str = "gpt"
    model: Mapping[str, Any]
    batch: int
    steps: int
    seeds: int
    guesses: Mapping[str, int]
    betas: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: TEXT_BETAS)
    warmups: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict.fromkeys(_METHODS, (50, 100)))
    clips: tuple[float | None, ...] = (None, 1.0)
    room: int = 2
    tuning_steps: int | None = None
    tuning_seeds: int = len(TUNING_SEEDS)
    controls: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(("EGOP, random rotation", *VARIANTS), "EGOP")
    )
    beta2: float = 0.95
    weight_decay: float = 0.1
    multiples: tuple[float, ...] = (1.5, 2.0, 3.0)
    evaluations: int = 10
    windows: int = 512
    crop: int = 96
    compiled: bool = False

    def length(self, multiple: float) -> int:
        """Return the number of steps of a run that is this many times as long."""
        return round(self.steps * multiple)


def _guess(adamw: int, muon: int, normuon: int, soap: int, egop: int, **further: int) -> dict[str, int]:
    own = dict.fromkeys(("PolarAdam", "EGOP", "EGOP, random rotation", *VARIANTS), egop)
    return {"AdamW": adamw, "Muon": muon, "NorMuon": normuon, "SOAP": soap, **own, **further}


_SMALL: dict[str, Any] = {"layers": 6, "width": 384, "heads": 6, "context": 256}
_TINY: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2}
_WIKITEXT: dict[str, Any] = {"data": "wikitext-2", "model": _SMALL, "batch": 64, "seeds": 8}
# Of all tasks but the first only the rate is tuned, but for AdamW's warm-up on Python code.
_WARMUPS = dict.fromkeys(_METHODS, (50,))
_RATE_ONLY: dict[str, Any] = {"warmups": _WARMUPS, "clips": (1.0,), "room": 1}
_CONTROLS = dict.fromkeys(("PolarAdam", "EGOP, random rotation", *VARIANTS), "EGOP")
_RATE_ONLY["controls"] = _CONTROLS
_LARGE_BETAS: dict[str, tuple[float, ...]] = {**dict.fromkeys(_ADAMS, (0.95,)), **dict.fromkeys(_MATRICES, (0.9,))}
_IMAGES: dict[str, Any] = {"data": "imagenette", "batch": 128, "seeds": 5, "beta2": 0.99, **_RATE_ONLY}
_IMAGES["betas"] = _LARGE_BETAS | dict.fromkeys(_ADAMS, (0.99,)) | {"SGD": (0.9,)}
# For tests: seconds on a CPU.
_TEST: dict[str, Any] = {"data": "synthetic", "batch": 8, "steps": 12, "seeds": 2}
_TEST["warmups"] = dict.fromkeys(_METHODS, (2, 4))
_TEST |= {"multiples": (1.5,), "evaluations": 3, "windows": 16}
_TEST["guesses"] = _guess(13, 15, 15, 14, 14, **{"SGD": 13, MUON_SIZED: 15, ADAMW_OUTSIDE: 13})
_TEST["betas"] = IMAGE_BETAS | TEXT_BETAS

_ALL = (
    Task(name="gpt-6x384-400", steps=400, guesses=_guess(2, 5, 4, 4, 2), **_WIKITEXT),
    Task(
        name="gpt-6x384-1600",
        steps=1600,
        guesses=_guess(1, 4, 3, 3, 1, **{MUON_SIZED: 5}),
        betas=_LARGE_BETAS,
        multiples=(2.0,),
        compiled=True,
        **_WIKITEXT,
        **(_RATE_ONLY | {"warmups": _WARMUPS | {"AdamW": (100,)}}),
    ),
    Task(
        name="gpt-4x144-400",
        steps=400,
        guesses=_guess(4, 6, 5, 5, 4),
        betas=_LARGE_BETAS,
        multiples=(),
        **(_WIKITEXT | {"model": {"layers": 4, "width": 144, "heads": 3, "context": 256}, "seeds": 5}),
        **_RATE_ONLY,
    ),
    Task(
        name="gpt-12x768-400",
        data="wikitext-2",
        model={"layers": 12, "width": 768, "heads": 12, "context": 256},
        batch=32,
        steps=400,
        seeds=5,
        guesses=_guess(-1, 3, 2, 3, 0, **{MUON_SIZED: 4}),
        betas=_LARGE_BETAS,
        multiples=(3.0,),
        **_RATE_ONLY,
    ),
    Task(  # 65,536 tokens a batch
        name="gpt-12x768-code",
        data="code",
        model={"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 32_768},
        batch=64,
        steps=573,
        seeds=3,
        guesses=_guess(-1, 3, 2, 3, 1, **{ADAMW_OUTSIDE: -1}),
        betas=_LARGE_BETAS,
        tuning_steps=144,
        tuning_seeds=1,
        multiples=(),
        windows=64,
        compiled=True,
        **(_RATE_ONLY | {"warmups": _WARMUPS | {"AdamW": (50, 100)}, "controls": _CONTROLS | {ADAMW_OUTSIDE: "AdamW"}}),
    ),
    Task(
        name="resnet-34",
        network="resnet",
        model={"depths": [3, 4, 6, 3], "width": 64, "classes": 10},
        steps=730,
        guesses=_guess(0, 6, 6, 4, 1, SGD=13),
        weight_decay=1e-4,
        **_IMAGES,
    ),
    Task(
        name="vit-6x384",
        network="vit",
        model={"classes": 10, "side": 96, "patch": 8, "layers": 6, "width": 384, "heads": 6, "hidden": 1024},
        steps=1168,
        guesses=_guess(-4, 2, 2, 2, 0),
        multiples=(2.0,),
        **_IMAGES,
    ),
    Task(name="tiny", model={**_TINY, "context": 16}, **_TEST),
    Task(
        name="tiny-code",
        model={**_TINY, "context": 8, "vocabulary": 300},
        tuning_steps=6,
        **(_TEST | {"data": "code", "warmups": dict.fromkeys(_METHODS, (2,)), "room": 1}),
    ),
    Task(name="tiny-resnet", network="resnet", model={"depths": [1, 1], "width": 4, "classes": 3}, crop=16, **_TEST),
    Task(
        name="tiny-vit",
        network="vit",
        model={**_TINY, "classes": 3, "side": 16, "patch": 8, "hidden": 16},
        crop=16,
        **_TEST,
    ),
)
TASKS = {task.name: task for task in _ALL}
METHOD_NAMES = list(dict.fromkeys(method for task in _ALL for method in task.guesses))

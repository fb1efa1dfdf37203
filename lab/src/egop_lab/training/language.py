"""One training of a small language model by one method: the optimizers to compare, and the run that is recorded."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop.training import train
from egop_lab.data.missing import MissingDataError
from egop_lab.data.text import Text, Windows, load
from egop_lab.models.gpt import GPT, initialize_
from egop_lab.training.context import Context, finished
from egop_lab.training.records import Record, Store
from egop_lab.training.residual import ADAMW, BOTH_SIDES, MUON, ONLINE
from egop_lab.training.sweeps import TUNING

FIXED, PERIODIC, SOAP = "EGOP fixed", "EGOP periodic", "SOAP"

BETAS = (0.9, 0.95)  # usual for language models; SOAP has its own
RENEWED = 10  # steps between two renewals, of online bases and SOAP's
_SHAPE = ("layers", "width", "heads", "context")
# The settings that decide the outcome of a run, besides its method, learning rate, length and seed.
COMMON = (*_SHAPE, "batch", "weight decay", "warm-up", "interval", "windows", "samples", "period")


@dataclass(frozen=True)
class Start:
    """What an optimizer is made from: a model at its start, its loss, and the settings of the run."""

    model: GPT
    objective: egop.Objective
    config: Mapping[str, Any]

    @property
    def decayed(self) -> dict[str, Any]:
        return {"lr": self.config["lr"], "weight_decay": self.config["weight decay"]}

    @property
    def adamw(self) -> dict[str, Any]:
        """The settings of AdamW in any coordinates; on a GPU its fastest form."""
        return {**self.decayed, "betas": BETAS, "fused": self.model.head.weight.is_cuda}


def _adamw(start: Start) -> torch.optim.Optimizer:
    return torch.optim.AdamW(start.model.parameters(), **start.adamw)


def _inside(structure: egop.Structure) -> dict[str, egop.Structure]:
    """The weights of the blocks; embeddings and the head stay in original coordinates, as with ``"auto"``."""
    return {"blocks.*": structure}


def _sampled(start: Start, *, renewed: bool) -> torch.optim.Optimizer:
    """One-sided bases from gradients at fresh initialisations; renewed from gradients at the current point."""
    config = start.config
    basis = egop.estimate(
        start.objective,
        rho=egop.Initialization(init_fn=initialize_),
        structure=_inside(egop.Shared()),
        samples=config["samples"],
        generator=torch.Generator().manual_seed(config["seed"]),
        sampling="loop",
        progress=False,
    )
    every = egop.Every(config["period"], start.objective, samples=config["samples"], seed=config["seed"])
    refresh = every if renewed else None
    return egop.ReparameterizedOptimizer(start.model, torch.optim.AdamW, basis, refresh=refresh, **start.adamw)


def _online(start: Start, structure: egop.Structure) -> torch.optim.Optimizer:
    refresh = egop.Online(every=RENEWED, structure=_inside(structure))
    return egop.ReparameterizedOptimizer(start.model, torch.optim.AdamW, refresh=refresh, **start.adamw)


def _soap(start: Start) -> torch.optim.Optimizer:
    """Two-sided bases for every matrix, embeddings and the head too: that is how it comes."""
    from pytorch_optimizer import SOAP

    return SOAP(start.model.parameters(), precondition_frequency=RENEWED, **start.decayed)


class _Together(torch.optim.Optimizer):
    """Optimizers that step as one, each over parameters of its own; the groups are theirs."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)


def _muon(start: Start) -> torch.optim.Optimizer:
    """The blocks' weights by Muon, with updates of AdamW's size; embeddings, norms and the head by AdamW."""
    matrices = [parameter for parameter in start.model.blocks.parameters() if parameter.dim() == 2]
    inside = set(matrices)
    others = [parameter for parameter in start.model.parameters() if parameter not in inside]
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **start.decayed)
    return _Together(muon, torch.optim.AdamW(others, **start.adamw))


METHODS: dict[str, Callable[[Start], torch.optim.Optimizer]] = {
    ADAMW: _adamw,
    FIXED: functools.partial(_sampled, renewed=False),
    PERIODIC: functools.partial(_sampled, renewed=True),
    ONLINE: functools.partial(_online, structure=egop.Shared()),
    BOTH_SIDES: functools.partial(_online, structure=egop.Kronecker()),
    SOAP: _soap,
    MUON: _muon,
}


class _Loss(nn.Module):
    """The mean cross-entropy of every byte of a window but the first, in nats; computed in bfloat16 on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model: nn.Module = model
        self.kind = device.type

    def forward(self, windows: Tensor) -> Tensor:
        windows = windows.long()
        with torch.autocast(self.kind, torch.bfloat16, enabled=self.kind == "cuda", cache_enabled=False):
            logits = self.model(windows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@functools.lru_cache(maxsize=1)
def _network(shape: tuple[int, ...], batch: int, device: torch.device) -> tuple[GPT, nn.Module]:
    """A model on the device, and its loss as a CUDA graph for training; kept for the runs to come.

    The graph spares the launching of single kernels, which would hide what the methods themselves cost.
    """
    sizes = dict(zip(_SHAPE, shape, strict=True))
    model = GPT(**sizes).to(device)
    loss = _Loss(model, device)
    if device.type == "cuda":
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
        sample = torch.zeros(batch, sizes["context"] + 1, dtype=torch.uint8, device=device)
        torch.cuda.make_graphed_callables(loss, (sample,))
    return model, loss


class Run:
    """One training for the training loop, which evaluates after every so many steps: batches, schedule, loss, clock.

    Args:
        text: what to train on and to validate with.
        config: of the run.
        device: where.
    """

    def __init__(self, text: Text, config: Mapping[str, Any], device: torch.device) -> None:
        self.config, self.device = config, device
        shape = tuple(config[name] for name in _SHAPE)
        start = GPT(**dict(zip(_SHAPE, shape, strict=True)))
        initialize_(start, torch.Generator().manual_seed(config["seed"]))
        self.model, self.training_loss = _network(shape, config["batch"], device)
        self.model.load_state_dict(start.state_dict())
        self.model.zero_grad()
        sizes = {"length": config["context"] + 1, "size": config["batch"], "count": config["interval"]}
        self.batches = Windows(text.train, seed=2 * config["seed"], **sizes)
        sampled = Windows(text.train, seed=2 * config["seed"] + 1, **sizes)
        self.objective = egop.Objective(self.model, lambda model, batch: _Loss(model, device)(batch), sampled)
        self.validation = text.windows(config["context"] + 1, config["windows"]).split(2 * config["batch"])
        self.steps = 0
        self.seconds = 0.0
        self.losses: list[Tensor] = []

    def loss(self, _: nn.Module, batch: Tensor) -> Tensor:
        loss = self.training_loss(batch)
        self.losses.append(loss.detach().clone())  # a graph writes every loss to the same place
        return loss

    def __iter__(self) -> Iterator[Tensor]:
        """The batches of one pass, each with its learning rate set: a linear warm-up, then constant."""
        self.losses = []
        self.began = time.perf_counter()
        for batch in self.batches:
            self.steps += 1
            for group in self.optimizer.param_groups:
                group["lr"] = self.config["lr"] * min(1.0, self.steps / self.config["warm-up"])
            yield batch

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.seconds += time.perf_counter() - self.began  # the training loop has just waited for the device
        loss = _Loss(model, self.device)
        total = sum(loss(windows) * len(windows) for windows in self.validation)
        training = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        count = sum(map(len, self.validation))
        return {"loss": float(total) / count, "training loss": training, "seconds": self.seconds}

    def __call__(self, progress: bool) -> dict[str, Any]:
        config = self.config
        looks = config["steps"] // config["interval"]
        self.model.train()
        self.began = time.perf_counter()
        self.optimizer = METHODS[config["method"]](Start(self.model, self.objective, config))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        options: dict[str, Any] = {"evaluate": self.evaluate, "progress": progress, "unit": "look"}
        options["description"] = f"{config['method']}, lr {config['lr']:g}, seed {config['seed']}"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # attention vmapped over samples
                curve = train(self.model, self.optimizer, self.loss, self, looks, **options)
        except torch.linalg.LinAlgError:  # what it decomposes has overflowed
            never = [math.nan] * (looks + 1)
            return {"validation loss": never, "training loss": never, "seconds": never, "diverged": True}
        curves = {"validation loss": curve.loss, **curve.metrics}
        left = [math.nan] * (looks + 1 - len(curve.loss))  # a run that diverged ended early
        result: dict[str, Any] = {name: [*values, *left] for name, values in curves.items()}
        return result | {"diverged": curve.diverged}


class Trials:
    """The runs of an experiment on one text with one device: does those that are not done, and gives those that are.

    Args:
        experiment: whose runs they are.
        store: where finished runs are.
        context: the preset, the device, the text's place, and how long runs may be started.
    """

    def __init__(self, experiment: Any, store: Store, context: Context) -> None:
        _check_packages()
        self.store, self.context, self._began = store, context, time.monotonic()
        self.settings = experiment.settings(context.preset)
        smallest = 10 * self.settings["batch"] * self.settings["context"]
        self._text = load(context.data, context.device, smallest=smallest)
        precision = "bfloat16, TF32" if context.device.type == "cuda" else "float32"
        common = {key: self.settings[key] for key in COMMON}
        self._common = experiment.config(context.preset, **common, data=self._text.summary, precision=precision)
        self._warm: set[str] = set()

    @property
    def done(self) -> list[Record]:
        """The finished runs."""
        return [run for run in self.store if shared(run) == self._common]

    def do(self, method: str, lr: float, steps: int, seed: int) -> bool:
        """Do one run, unless it is done; false when the time is over."""
        config = self._common | {"method": method, "lr": lr, "steps": steps, "seed": seed}
        if config in self.store:
            return True
        context = self.context
        if context.time_budget is not None and time.monotonic() - self._began > context.time_budget:
            return False
        if seed < TUNING and method not in self._warm:  # no run whose time is read pays for what the first one sets up
            short = {"steps": config["interval"], "period": config["interval"] // 2}
            Run(self._text, config | short, context.device)(progress=False)
            self._warm.add(method)
        started = time.perf_counter()
        result = Run(self._text, config, context.device)(context.progress)
        self.store.add(finished(config, result, time.perf_counter() - started, context.device))
        return True


def shared(run: Record) -> dict[str, Any]:
    """What all runs that are compared have in common: the rest of a configuration."""
    return {key: value for key, value in run.config.items() if key not in ("method", "lr", "steps", "seed")}


def _check_packages() -> None:
    """Raise an error when a method's package is missing; import it, which takes seconds that no run is to pay for."""
    try:
        import pytorch_optimizer  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDataError(
            "SOAP comes from a package that is not installed: pip install pytorch_optimizer"
        ) from error

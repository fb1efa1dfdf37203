"""The forms that a training can have: how each is made and written, and what its steps take beside AdamW's here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from egop.basis import Basis, Block, Kronecker, Shared, Structure
from egop.diagnostics.short_runs import check_gradient, clock, held_batches, trained_parameters
from egop.estimation import Objective
from egop.optimizer import ReparameterizedOptimizer
from egop.recipes import EGOP
from egop.refresh import Online

__all__ = ["FIXED", "FORMS", "TURNS", "Make", "Taken", "maker", "measured", "written"]

FIXED = "fixed"
# As the study of prediction in the lab calls them.
FORMS = (FIXED, "online one-sided", "online two-sided", "EGOP")

# How the bases of each are built.
STRUCTURES: dict[str, Structure] = {
    FIXED: Shared(),
    "online one-sided": Shared(),
    "online two-sided": Kronecker(),
    "EGOP": Shared(side="smaller"),
}

# A turn has so many steps, with all renewals of a round in them. There are turns for so many seconds, or so many turns.
_TURN = 20
TURNS, _SECONDS = 5, 0.5
# Of steps that are timed only: nothing is to be learnt in them.
_LR = 1e-9

Make = Callable[[nn.Module], torch.optim.Optimizer]


def maker(
    form: str, basis: Basis | None, kind: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> Callable[..., torch.optim.Optimizer]:
    """``make(model)`` for a form: AdamW, or another class, in some coordinates; EGOP; ``""`` for the class as it is."""

    def make(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
        if form == FIXED:
            return ReparameterizedOptimizer(model, kind, basis, lr=lr)
        if form == "online one-sided":
            online = Online(structure=Shared())
            return ReparameterizedOptimizer(model, kind, refresh=online, outside=kind, lr=lr)
        if form == "online two-sided":
            return ReparameterizedOptimizer(model, kind, refresh=Online(), lr=lr)
        if form == "EGOP":
            return EGOP(model, lr=lr)
        return kind(trained_parameters(model), lr=lr)  # type: ignore[call-arg]  # the base class has no lr

    return make


def written(form: str, lr: str) -> str:
    """The same, to be pasted."""
    make = "optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, {}lr=" + f"{lr})"
    return {
        FIXED: make.format("basis, "),
        "online one-sided": make.format("refresh=egop.Online(structure=egop.Shared()), outside=torch.optim.AdamW, "),
        "online two-sided": make.format("refresh=egop.Online(), "),
        "EGOP": f"optimizer = egop.EGOP(model, lr={lr})",
    }[form]


@dataclass(frozen=True)
class Taken:
    """What the steps of a form take here.

    Attributes:
        seconds: of a step of the optimizer, without forward and backward pass.
        plain: of one of AdamW's, measured in turn with it.
        bytes: that the optimizer holds more than AdamW does.
        blocks: that have a basis, and how it is built.
    """

    seconds: float
    plain: float
    bytes: int
    blocks: Mapping[Block, Structure]


def measured(objective: Objective, form: str, basis: Basis | None, seed: int, tick: Callable[[], object]) -> Taken:
    """Steps of a form and of AdamW in turn, on copies of the model; the fastest turn of each, as others may be busy."""
    (batch,) = held_batches(objective, 1, seed)
    with objective.preserve(seed=seed):
        pair = []
        for make in (maker("", None), maker(form, basis)):
            model, loss_fn = objective.trainable_copy()
            check_gradient(model, loss_fn, batch)
            optimizer = make(model, lr=_LR)
            loss_fn(model, batch).backward()
            for _ in range(2):  # the first one finds bases, and may compile, allocate and load
                optimizer.step()
            pair.append(optimizer)
        best = [float("inf")] * 2
        began = clock()
        for turn in range(TURNS):
            if turn > 1 and clock() - began > _SECONDS:
                break
            best = [min(old, _turn(optimizer)) for old, optimizer in zip(best, pair, strict=True)]
            tick()
        plain, other = pair
        changes = list(other.basis.values()) if isinstance(other, ReparameterizedOptimizer) else []
        blocks = {change.block: change.structure() for change in changes}
        return Taken(best[1], best[0], max(0, held(other) - held(plain)), blocks)


def _turn(optimizer: torch.optim.Optimizer) -> float:
    began = clock()
    for _ in range(_TURN):
        optimizer.step()
    return (clock() - began) / _TURN


def held(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of all tensors that an optimizer consists of, each storage once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = [optimizer]
    while todo:
        holder = todo.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if isinstance(holder, torch.Tensor):
            storage = holder.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(holder, Mapping):
            todo += [*holder.keys(), *holder.values()]
        elif isinstance(holder, (list, tuple)):
            todo += holder
        elif type(holder).__module__.startswith(("egop.", "torch.optim")) and hasattr(holder, "__dict__"):
            todo.append(vars(holder))
    return sum(storages.values())

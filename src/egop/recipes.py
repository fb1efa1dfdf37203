"""Recipes: a rotation and a base optimizer that do well together, as one class.

Which ones is decided by the lab's race, and written in one place here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from egop.basis import Shared
from egop.optim import PolarAdam
from egop.optimizer import ReparameterizedOptimizer
from egop.refresh import Online

__all__ = ["EGOP"]


def _parts(betas: tuple[float, float], eps: float, every: int, memory: int | str) -> dict[str, Any]:
    """The combination itself: nothing else in this file depends on which one it is."""
    return {
        "optimizer_class": PolarAdam,
        "refresh": Online(every=every, structure=Shared(side="smaller"), memory=memory, spread=False),
        "outside": torch.optim.AdamW,
        "betas": betas,
        "eps": eps,
    }


class EGOP(ReparameterizedOptimizer):
    """The combination that measured best: in the place of AdamW, with a learning rate of AdamW's size.

    Weights are stepped by :class:`egop.optim.PolarAdam` in the eigenbasis of their gradients' Gram matrices, of the
    smaller side, which :class:`egop.Online` keeps current: those of linear layers, convolutions, attention and experts,
    first layers too. Embeddings, output heads, norms, biases and very wide layers are stepped by AdamW;
    ``optimizer.refresher.unrotated`` says what was left, and why. If there is no weight to rotate, AdamW steps
    everything, and the first step warns of that.

    Measured so far on one task, a GPT of 6 blocks of width 384 on bytes of text (400 steps, every method at its own
    tuned rate, medians of three seeds; ``docs/coordinates.md``): the combination ends at a validation loss of 1.176,
    PolarAdam without a rotation at 1.187, NorMuon at 1.200, Muon at 1.217, SOAP at 1.259 and AdamW at 1.566, a loss
    that it reaches after 140 steps. A whole step took 1.25 times AdamW's on one H200. Its best learning rate was four
    times AdamW's best one, and half or twice that rate cost 0.02 at most. On networks that train in seconds the factor
    was anything from a quarter to ten: begin with AdamW's rate and with four times that, or with :func:`egop.find_lr`.

    For other choices write out the parts, with :class:`egop.ReparameterizedOptimizer`. A state of the one loads into
    the other.

    Args:
        params: a module; or ``model.named_parameters()`` or parameter groups, with ``model`` beside them.
        lr: learning rate, of AdamW's size.
        betas: decays of the running means of gradients and of their squares, for all parameters.
        eps: added to the root of the latter.
        weight_decay: decoupled, as AdamW's, for all parameters; for none on norms and biases give these a group.
        every: how many steps lie between two renewals of a basis.
        memory: what all bases together may take; more is an error in the first step.
        model: the module whose parameters these are, where ``params`` is not the module itself: it tells what they are.
        foreach: for AdamW, as in torch.
        fused: likewise.
        compile: whether the basis products of a step go through ``torch.compile``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.EGOP(model, lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.basis), optimizer.refresher.unrotated
        (['0.weight'], {'2.weight': 'the output head'})
    """

    # They mean the same to both optimizers, so that one setting, and one scheduler, is for all parameters.
    _shared_settings = (*ReparameterizedOptimizer._shared_settings, "betas", "eps")

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        every: int = 20,
        memory: int | str = "2GiB",
        model: nn.Module | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        compile: bool = False,
    ) -> None:
        parts = _parts(betas, eps, every, memory)
        given = {"foreach": foreach, "fused": fused}
        parts["outside"] = parts["outside"], {key: value for key, value in given.items() if value is not None}
        super().__init__(params, model=model, compile=compile, lr=lr, weight_decay=weight_decay, **parts)

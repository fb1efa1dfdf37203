"""Recipes: a rotation and a base optimizer that do well together, as one class.

Which ones is decided by the lab's race, and written in one place here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from egop.basis import Basis, Identity, Shared
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
    r"""The combination that measured best on text, in the place of AdamW; with four to eight times its learning rate.

    Weights are stepped by :class:`egop.optim.PolarAdam` in the eigenbasis of their gradients' Gram matrices, of the
    smaller side, which :class:`egop.Online` keeps current: those of linear layers, convolutions, attention and experts,
    first layers too. Embeddings, output heads, norms, biases and very wide layers are stepped by AdamW;
    ``optimizer.refresher.unrotated`` says what was left, and why. If there is no weight to rotate, AdamW steps
    everything, and the first step warns of that.

    Measured on four tasks, every method at its own tuned learning rate, one H200 (``docs/coordinates.md``). The last
    validation loss, medians of three seeds:

    =============== ========= ========== ========= =========
    \               GPT 6×384 GPT 12×768 ResNet-34 ViT 6×384
    =============== ========= ========== ========= =========
    EGOP            1.177     1.211      0.488     0.625
    PolarAdam alone 1.187     not all    0.477     0.599
    Muon            1.217     1.268      0.505     0.615
    NorMuon         1.200     1.262      0.492     0.626
    SOAP            1.259     1.358      0.505     0.663
    AdamW           1.566     1.716      0.718     0.834
    =============== ========= ========== ========= =========

    Most of the gain is PolarAdam's. The rotation adds to it on text, not on images. A whole step takes 1.17, 1.46, 1.32
    and 1.11 times AdamW's (Muon's 1.09, 1.24, 1.15 and 1.07).

    **Learning rate.** Eight times AdamW's best rate ended within 0.014 of EGOP's own best loss on all four tasks, four
    times within 0.034. On networks that train in seconds the factor was anything from a quarter to ten: there try
    AdamW's own rate too, or ask :func:`egop.find_lr`.

    For other choices write out the parts, with :class:`egop.ReparameterizedOptimizer`. A state of the one loads into
    the other.

    Args:
        params: a module; or ``model.named_parameters()`` or parameter groups, with ``model`` beside them.
        lr: learning rate; begin with four to eight times AdamW's best one.
        betas: decays of the running means of gradients and of their squares, for all parameters.
        eps: added to the root of the latter.
        weight_decay: decoupled, as AdamW's (whose default in torch is 0.01), for all parameters; for none on norms and
            biases give these a group.
        rotate: set to False to run the same base optimizer on the same weights without a rotation.
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
        rotate: bool = True,
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
        if not rotate:
            params = params if isinstance(params, nn.Module) else list(params)  # type: ignore[assignment]
            # Never stepped: it only says which weights EGOP rotates.
            parts["refresh"] = Online(structure=Identity())
            plan = ReparameterizedOptimizer(params, model=model, lr=lr, weight_decay=weight_decay, **parts).plan
            parts["refresh"] = None
            parts["basis"] = Basis([Identity().change(block, {}) for block in plan.chosen], unrotated=plan.unrotated)
        super().__init__(params, model=model, compile=compile, lr=lr, weight_decay=weight_decay, **parts)

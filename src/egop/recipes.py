"""EGOP: the recommended combination of base optimizer, structure and refresh, as one class.

The lab's race decides which combination that is.
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


class EGOP(ReparameterizedOptimizer):
    r"""PolarAdam in an online eigenbasis, and AdamW for the rest: the combination that performed best on text.

    Use it in place of AdamW, with four to eight times AdamW's learning rate.

    :class:`egop.optim.PolarAdam` steps the weights of linear layers (including the first), convolutions, attention and
    experts in the eigenbasis of their gradients' Gram matrices, on the smaller side. :class:`egop.Online` keeps that
    basis current. AdamW steps embeddings, output heads, norms, biases and very wide layers;
    ``optimizer.refresher.unrotated`` lists them with the reason. If no weight can be rotated, AdamW steps everything
    and the first step warns about it.

    Final validation loss on four tasks, each method at its own tuned learning rate, median of three seeds, one H200
    (``docs/coordinates.md``; *not all*: some seeds were not run):

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

    Most of the gain comes from PolarAdam. The rotation adds to it on text but not on images. A training step takes
    1.17, 1.46, 1.32 and 1.11 times as long as AdamW's (Muon: 1.09, 1.24, 1.15 and 1.07).

    **Learning rate.** On all four tasks, eight times AdamW's best rate came within 0.014 of EGOP's own best loss, and
    four times within 0.034. On networks that train in seconds the best factor ranged from a quarter to ten: try AdamW's
    own rate there too, or use :func:`egop.find_lr`.

    For other choices, combine the parts yourself with :class:`egop.ReparameterizedOptimizer`. Each of the two loads the
    other's state dict.

    Args:
        params: a module; or ``model.named_parameters()`` or parameter groups, together with ``model``.
        lr: learning rate; start with four to eight times AdamW's best rate.
        betas: decay of the running means of gradients and of their squares, for all parameters.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay for all parameters (torch's AdamW defaults to 0.01). To exclude norms and
            biases, put them in a group of their own.
        rotate: set to False to run the same base optimizer on the same weights without a rotation.
        every: number of steps between refreshes of a basis.
        memory: limit for all bases together; the first step raises an error if they need more.
        model: the module that owns the parameters, if ``params`` is not a module; it determines their roles.
        foreach: passed to AdamW.
        fused: passed to AdamW.
        compile: whether ``torch.compile`` compiles the basis products of a step.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.EGOP(model, lr=1e-3, weight_decay=0.1)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> list(optimizer.basis), optimizer.refresher.unrotated
        (['0.weight'], {'2.weight': 'the output head'})
    """

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
        flags = {"foreach": foreach, "fused": fused}
        parts: dict[str, Any] = {
            "optimizer_class": PolarAdam,
            "outside": (
                torch.optim.AdamW,
                {"betas": betas, "eps": eps, **{name: value for name, value in flags.items() if value is not None}},
            ),
            "model": model,
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        if rotate:
            structure = Shared(side="smaller")
            parts["refresh"] = Online(every=every, structure=structure, memory=memory, spread=False)
        else:
            params = params if isinstance(params, nn.Module) else list(params)  # type: ignore[assignment]
            # This optimizer is never stepped. It only determines which weights EGOP would rotate.
            plan = ReparameterizedOptimizer(params, refresh=Online(structure=Identity()), **parts).plan
            parts["basis"] = Basis([Identity().change(block, {}) for block in plan.chosen], unrotated=plan.unrotated)
        super().__init__(params, compile=compile, **parts)

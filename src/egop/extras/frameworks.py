"""Factories for frameworks that construct the optimizer themselves."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from egop.basis import Basis
from egop.optimizer import ReparameterizedOptimizer
from egop.recipes import EGOP
from egop.refresh import Refresh


class TrainerOptimizer(ReparameterizedOptimizer):
    """:class:`egop.ReparameterizedOptimizer` as Hugging Face's ``Trainer`` constructs it: from unnamed groups.

    ``Trainer`` replaces its parameter groups by a keyword argument ``model``, which would lose
    ``TrainingArguments(weight_decay=...)``. So the model argument has another name here.

    Args:
        params: parameter groups made by ``Trainer``, one with weight decay and one without.
        network: the model, which provides the parameters' names and roles.
        **options: other arguments of :class:`egop.ReparameterizedOptimizer`.
    """

    def __init__(self, params: Any, *, network: nn.Module, **options: Any) -> None:
        super().__init__(params, model=network, **options)


class TrainerEGOP(EGOP):
    """:class:`egop.EGOP` as Hugging Face's ``Trainer`` constructs it, see :class:`TrainerOptimizer`."""

    def __init__(self, params: Any, *, network: nn.Module, **options: Any) -> None:
        super().__init__(params, model=network, **options)


def trainer_optimizer(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    basis: Basis | None = None,
    *,
    lr: float,
    refresh: Refresh | None = None,
    **hyperparameters: Any,
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return the ``optimizer_cls_and_kwargs`` for Hugging Face's ``Trainer``.

    ``Trainer`` then constructs the optimizer from its own parameter groups: one with the weight decay of
    ``TrainingArguments`` and one without any (biases, norms).

    Args:
        model: the model that ``Trainer`` is given.
        optimizer_class: :class:`egop.EGOP`, or as in :class:`egop.ReparameterizedOptimizer`.
        basis: as in :class:`egop.ReparameterizedOptimizer`.
        lr: learning rate. ``Trainer`` does not pass on ``TrainingArguments(learning_rate=...)`` in this case.
        refresh: as in :class:`egop.ReparameterizedOptimizer`.
        **hyperparameters: as in :class:`egop.ReparameterizedOptimizer`, but set ``weight_decay`` in
            ``TrainingArguments``.

    Example:
        >>> network = torch.nn.Linear(4, 2)
        >>> made = egop.extras.trainer_optimizer(network, torch.optim.AdamW, refresh=egop.Online(), lr=1e-3)
        >>> # trainer = transformers.Trainer(network, arguments, train_dataset=..., optimizer_cls_and_kwargs=made)
    """
    if "weight_decay" in hyperparameters:
        raise TypeError(
            f"weight_decay={hyperparameters['weight_decay']} would be lost: Trainer sets the weight decay of each "
            "group. Use TrainingArguments(weight_decay=...)."
        )
    arguments = {"network": model, "lr": lr} | hyperparameters
    if optimizer_class is not EGOP:
        return TrainerOptimizer, {"optimizer_class": optimizer_class, "basis": basis, "refresh": refresh} | arguments
    if basis is not None or refresh is not None:
        raise TypeError("egop.EGOP has its own refresh and takes neither basis= nor refresh=.")
    return TrainerEGOP, arguments

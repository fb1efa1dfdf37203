"""What frameworks need that make the optimizer themselves."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from egop.basis import Basis
from egop.optimizer import ReparameterizedOptimizer
from egop.recipes import EGOP
from egop.refresh import Refresh

__all__ = ["TrainerEGOP", "TrainerOptimizer", "trainer_optimizer"]


class TrainerOptimizer(ReparameterizedOptimizer):
    """The optimizer as Hugging Face's ``Trainer`` makes it: from groups of parameters without names.

    ``Trainer`` takes a keyword ``model`` for itself, and would then give the optimizer the model in the place of its
    groups, so that ``TrainingArguments(weight_decay=...)`` were lost. Hence a keyword of another name.

    Args:
        params: the groups that ``Trainer`` made, one with weight decay and one without.
        optimizer_class: as in :class:`egop.ReparameterizedOptimizer`.
        basis: likewise.
        network: the model, from which names and roles are taken.
        **rest: all other arguments of :class:`egop.ReparameterizedOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        basis: Basis | None = None,
        *,
        network: nn.Module,
        **rest: Any,
    ) -> None:
        super().__init__(params, optimizer_class, basis, model=network, **rest)


class TrainerEGOP(EGOP):
    """:class:`egop.EGOP` as Hugging Face's ``Trainer`` makes it, see :class:`TrainerOptimizer`.

    Args:
        params: the groups that ``Trainer`` made.
        network: the model, from which names and roles are taken.
        **rest: all other arguments of :class:`egop.EGOP`.
    """

    def __init__(self, params: Any, *, network: nn.Module, **rest: Any) -> None:
        super().__init__(params, model=network, **rest)


def trainer_optimizer(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    basis: Basis | None = None,
    *,
    lr: float,
    refresh: Refresh | None = None,
    **hyperparameters: Any,
) -> tuple[type[Optimizer], dict[str, Any]]:
    """What to hand to Hugging Face's ``Trainer`` as ``optimizer_cls_and_kwargs``.

    ``Trainer`` then makes the optimizer when it is ready to, from its own groups: those with the weight decay of
    ``TrainingArguments``, and those without any (biases, norms).

    Args:
        model: the model that ``Trainer`` is given.
        optimizer_class: as in :class:`egop.ReparameterizedOptimizer`; or :class:`egop.EGOP`.
        basis: as in :class:`egop.ReparameterizedOptimizer`.
        lr: the learning rate. ``Trainer`` does not hand ``TrainingArguments(learning_rate=...)`` to an optimizer that
            it is told to make, so it has to be said here.
        refresh: as in :class:`egop.ReparameterizedOptimizer`.
        **hyperparameters: likewise; but ``weight_decay`` belongs into ``TrainingArguments``.

    Example:
        >>> network = torch.nn.Linear(4, 2)
        >>> made = egop.extras.trainer_optimizer(network, torch.optim.AdamW, refresh=egop.Online(), lr=1e-3)
        >>> # trainer = transformers.Trainer(network, arguments, train_dataset=..., optimizer_cls_and_kwargs=made)
    """
    if "weight_decay" in hyperparameters:
        raise TypeError(
            f"weight_decay={hyperparameters['weight_decay']} would be lost: Trainer sets that of each group itself. "
            "Use TrainingArguments(weight_decay=...)."
        )
    if optimizer_class is EGOP:
        if basis is not None or refresh is not None:
            raise TypeError(
                "egop.EGOP has a refresh of its own, and takes neither basis= nor refresh=. Write out its parts: "
                "trainer_optimizer(model, egop.optim.PolarAdam, refresh=..., outside=torch.optim.AdamW, lr=...)."
            )
        return TrainerEGOP, {"network": model, "lr": lr} | hyperparameters
    arguments = {"optimizer_class": optimizer_class, "basis": basis, "network": model, "refresh": refresh, "lr": lr}
    return TrainerOptimizer, arguments | hyperparameters

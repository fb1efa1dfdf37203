"""Every: a basis that is re-estimated at regular intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from egop.basis import Basis, ChangeOfBasis, Partition, Plan, StructureChoice, check_structure, make_plan
from egop.estimation import (
    Distribution,
    NoGradientError,
    Objective,
    Recentered,
    estimate,
    estimate_plan,
    partition_objective,
)
from egop.formatting import parse_bytes
from egop.numerics import check_positive_int
from egop.optimizer import Moments, Rebasable, Refresh, Refresher, check_moments, named_parameters


@dataclass(frozen=True)
class Every(Refresh):
    """A refresh that re-estimates the basis at the current point at regular intervals: the paper's periodic variant.

    Args:
        every: number of steps between estimates.
        objective: the objective whose gradients are sampled. It must use the model that is trained, not a copy.
        rho: distribution of the points; by default all are at the current parameters, and gradients differ by their
            batches.
        samples: number of points; by default as many as the structures need.
        partition: which parameters form a block, if the optimizer has no basis to start with.
        structure: the structure of the blocks, if the optimizer has no basis to start with.
        memory: memory limit for all bases together, if the optimizer has no basis to start with.
        moments: what happens to the base optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
        seed: seed for sampling; each renewal combines it with its own index.
        progress: whether to show a progress bar while sampling.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> batches = torch.randn(10, 8, 4, generator=torch.Generator().manual_seed(0))
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), batches)
        >>> refresh = egop.Every(100, objective, structure=egop.Shared())
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    """

    every: int
    objective: Objective | None = None
    rho: Distribution = Recentered()  # noqa: RUF009 - frozen, so it can be shared
    samples: int | None = None
    partition: Partition = "layer"
    structure: StructureChoice = "auto"
    memory: int | str = "2GiB"
    moments: Moments = "rotate"
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        check_positive_int("every", self.every)
        check_moments(self.moments)
        check_structure(self.structure)
        if not isinstance(self.objective, Objective):
            raise TypeError(
                f"egop.Every needs an egop.Objective to sample gradients of, got {self.objective!r}. "
                "To learn the basis from the training gradients alone, use egop.Online()."
            )
        if self.samples is not None:
            check_positive_int("samples", self.samples)
        if not isinstance(self.rho, Distribution):
            raise TypeError(f"rho must be a distribution such as egop.Recentered(), got {self.rho!r}.")
        self.rho.check(self.objective)

    def start(self, optimizer: Rebasable) -> Refresher:
        """Create the refresher for one optimizer."""
        assert self.objective is not None
        _check_parameters(self.objective, optimizer)
        return _EveryRefresher(self, self.objective)


class _EveryRefresher(Refresher):
    def __init__(self, config: Every, objective: Objective) -> None:
        super().__init__()
        self.config, self.objective = config, objective

    def before_step(self, optimizer: Rebasable) -> None:
        if self.steps % self.config.every == 0 and (self.steps > 0 or not optimizer.blocks):
            self.renew(optimizer)

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1

    def plan(self, optimizer: Rebasable) -> Plan | None:
        config = self.config
        if optimizer.blocks:
            return None
        return make_plan(
            *partition_objective(self.objective, config.partition), config.structure, parse_bytes(config.memory)
        )

    def check(self, optimizer: Rebasable, changes: Sequence[ChangeOfBasis]) -> None:
        _check_parameters(self.objective, optimizer)

    def renew(self, optimizer: Rebasable) -> None:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.renewals)
        self.renewals += 1
        is_first = not optimizer.blocks
        try:
            basis = self._estimate(optimizer, generator)
        except (torch.linalg.LinAlgError, FloatingPointError) as error:
            self.count_error(error)
        except NoGradientError as error:
            if is_first:  # a mistake here; later it means that the loss has reached its minimum
                raise
            self.count_error(error)
        else:
            # If an earlier estimate failed, the moments are still those of the original coordinates.
            optimizer.rebase(basis, moments="reset" if is_first else self.config.moments)

    def _estimate(self, optimizer: Rebasable, generator: torch.Generator) -> Basis:
        config = self.config
        if optimizer.blocks:  # a frozen block has no gradient and keeps its basis
            changes = [block.change for block in optimizer.blocks]
            live = self.objective.parameters
            trained = [change for change in changes if all(name in live for name in change.block.parameters)]
            plan = Plan({change.block: change.structure() for change in trained}, {})
            return estimate_plan(self.objective, plan, config.rho, config.samples, generator, "auto", config.progress)
        return estimate(
            self.objective,
            rho=config.rho,
            partition=config.partition,
            structure=config.structure,
            samples=config.samples,
            memory=config.memory,
            generator=generator,
            progress=config.progress,
        )


def _check_parameters(objective: Objective, optimizer: Rebasable) -> None:
    """Raise an error if the objective has its own copies of parameters that the optimizer trains."""
    objective.check_unsharded()
    trained = named_parameters(optimizer.param_groups)
    copies = [
        f"'{name}'"
        for name, parameter in objective.parameters.items()
        if name in trained and not _share_memory(parameter, trained[name])
    ]
    if copies:
        listed = ", ".join(copies[:3]) + (", …" if len(copies) > 3 else "")
        advice = (
            "Give it the tensors that are trained: egop.Objective.from_function(function, tensors)."
            if objective.module is None
            else "Build it from the model that is trained: egop.Objective(model, loss_fn, batches)."
        )
        raise ValueError(
            f"The objective of egop.Every has parameters of its own, which this optimizer does not train: {listed}. "
            f"{advice}"
        )


def _share_memory(tensor: Tensor, trained: Tensor) -> bool:
    """Return True if two tensors share memory, or if that is unknown, as for a sharded tensor and a full copy."""
    if tensor is trained or not type(tensor.data) is type(trained.data) is Tensor:
        return True
    return tensor.untyped_storage().data_ptr() == trained.untyped_storage().data_ptr()

"""Every: the basis estimated again every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Partition, Plan, StructureChoice, check_structure, make_plan, strip_compile_prefix
from egop.estimation import Distribution, NoGradientError, Objective, Recentered, blocks_of, estimate, estimate_plan
from egop.formatting import parse_bytes
from egop.numerics import check_positive
from egop.optimizer import Moments, Rebasable, Refresh, Refresher, check_moments


@dataclass(frozen=True)
class Every(Refresh):
    """Estimate the basis again every so many steps, around wherever training has come: the paper's periodic form.

    Args:
        steps: how many steps lie between two estimates.
        objective: what to sample gradients of; of the model that is trained itself, not of a copy.
        rho: where the points are drawn; by default at the current parameters, where gradients differ by their batches.
        samples: how many points; by default what the structures ask for.
        partition: which parameters form a block, when the optimizer has no basis to start with.
        structure: their structure, likewise.
        memory: what all bases together may take, likewise.
        moments: what becomes of the inner optimizer's moments: ``"rotate"``, ``"keep"`` or ``"reset"``.
        seed: of the sampling; each renewal draws from this and its number.
        progress: show a progress bar while sampling.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> batches = torch.randn(10, 8, 4, generator=torch.Generator().manual_seed(0))
        >>> objective = egop.Objective(model, lambda model, batch: model(batch).square().mean(), batches)
        >>> refresh = egop.Every(100, objective, structure=egop.Shared())
        >>> optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, refresh=refresh, lr=1e-3)
    """

    steps: int
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
        check_positive("steps", self.steps)
        check_moments(self.moments)
        check_structure(self.structure)
        if not isinstance(self.objective, Objective):
            raise TypeError(
                f"egop.Every needs an egop.Objective to sample gradients of, got {self.objective!r}. "
                "To learn the basis from the training gradients alone, use egop.Online()."
            )
        if self.samples is not None:
            check_positive("samples", self.samples)
        if not isinstance(self.rho, Distribution):
            raise TypeError(f"rho must be a distribution such as egop.Recentered(), got {self.rho!r}.")
        self.rho.check(self.objective)

    def begin(self, optimizer: Rebasable) -> Refresher:
        """What keeps count for one optimizer."""
        assert self.objective is not None
        _check_trained(self.objective, optimizer)
        return _Periodic(self, self.objective)


class _Periodic(Refresher):
    def __init__(self, config: Every, objective: Objective) -> None:
        super().__init__()
        self.config, self.objective = config, objective

    def before_step(self, optimizer: Rebasable) -> None:
        if self.steps % self.config.steps == 0 and (self.steps > 0 or not optimizer.blocks):
            self.renew(optimizer)

    def after_step(self, optimizer: Rebasable) -> None:
        self.steps += 1

    def plan(self, optimizer: Rebasable) -> Plan | None:
        config = self.config
        if optimizer.blocks:
            return None
        return make_plan(*blocks_of(self.objective, config.partition), config.structure, parse_bytes(config.memory))

    def check(self, optimizer: Rebasable) -> None:
        _check_trained(self.objective, optimizer)

    def renew(self, optimizer: Rebasable) -> None:
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.renewals)
        self.renewals += 1
        first = not optimizer.blocks
        try:
            if not first:
                plan = Plan({change.block: change.structure() for change in self._trained(optimizer)}, {}, {})
                basis = estimate_plan(
                    self.objective, plan, config.rho, config.samples, generator, "auto", config.progress
                )
            else:
                basis = estimate(
                    self.objective,
                    rho=config.rho,
                    partition=config.partition,
                    structure=config.structure,
                    samples=config.samples,
                    memory=config.memory,
                    generator=generator,
                    progress=config.progress,
                )
        except (torch.linalg.LinAlgError, FloatingPointError) as error:
            self.failed(error)
        except NoGradientError as error:
            if first:  # a mistake; later, a loss that has come to its end
                raise
            self.failed(error)
        else:
            # A first basis that comes late, after one that failed, finds moments of other coordinates.
            optimizer.rebase(basis, moments="reset" if first else config.moments)

    def _trained(self, optimizer: Rebasable) -> list[ChangeOfBasis]:
        """The changes of basis of the blocks that train; one that is frozen has no gradient and keeps its basis."""
        live = self.objective.parameters
        changes = [block.change for block in optimizer.blocks]
        return [change for change in changes if all(name in live for name in change.block.parameters)]


def _check_trained(objective: Objective, optimizer: Rebasable) -> None:
    """Raise an error for an objective whose parameters stay where they are while others of their names are trained."""
    objective.check_whole()
    trained = {
        strip_compile_prefix(name): parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    foreign = [
        f"'{name}'"
        for name, parameter in objective.parameters.items()
        if name in trained and not _is_one(parameter, trained[name])
    ]
    if foreign:
        listed = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        advice = (
            "Give it the tensors that are trained: egop.Objective.from_function(function, tensors)."
            if objective.module is None
            else "Build it from the model that is trained: egop.Objective(model, loss_fn, batches)."
        )
        raise ValueError(
            f"The objective of egop.Every has parameters of its own, which this optimizer does not train: {listed}. "
            f"{advice}"
        )


def _is_one(tensor: Tensor, trained: Tensor) -> bool:
    """Whether two tensors have one memory; also where that cannot be told, as of a sharded one and a whole copy."""
    if tensor is trained or not type(tensor.data) is type(trained.data) is Tensor:
        return True
    return tensor.untyped_storage().data_ptr() == trained.untyped_storage().data_ptr()

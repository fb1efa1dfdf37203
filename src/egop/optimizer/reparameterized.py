"""ReparameterizedOptimizer: any coordinate-wise torch optimizer, run in another basis."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egop.basis import Basis, ModuleIndex, Plan, check_disjoint, find_roles
from egop.numerics import outside_inference_mode, without_autocast
from egop.optimizer import display
from egop.optimizer.binding import BoundBlock
from egop.optimizer.checks import check_optimizer, complete_hyperparameters, find_user_level
from egop.optimizer.engine import Engine
from egop.optimizer.groups import name_groups, named_parameters
from egop.optimizer.inner import BaseOptimizer
from egop.optimizer.moments import Moments
from egop.optimizer.refreshing import Refresh, Refresher, check_refresh
from egop.optimizer.state import ExportedState, RestoredParts, parse_state_dict, rebuild


class ReparameterizedOptimizer(Optimizer):
    r"""An optimizer run on :math:`f \circ V`, while the model keeps its own parameters.

    Every step encodes the gradients (:math:`V^\top g`), steps the base optimizer in coordinates and writes the decoded
    coordinates (:math:`V \tilde\theta`) back: exactly the base optimizer on the reparameterized objective.

    The ``param_groups`` hold the model's own parameters and own the hyper-parameters, so schedulers, gradient clipping,
    ``GradScaler`` and hooks work as with any optimizer. Parameters outside every block are stepped unrotated.
    Rotated parameters in half precision have float32 coordinates, which serve as master weights.

    If a parameter is changed between steps (loaded, averaged or clipped), its version counter shows this and the
    parameter is encoded again. Writes through ``parameter.data`` bypass that counter. They are noticed on the CPU,
    where comparing values is cheap; on other devices, write under ``torch.no_grad()`` to the parameter itself.

    Args:
        params: a module, ``model.named_parameters()``, or parameter groups of named parameters; a group may have its
            own ``"basis"``. With ``model``, the parameters need no names.
        optimizer_class: any ``torch.optim`` class, or another ``Optimizer`` class, that works coordinate by coordinate.
        basis: the change of basis of each block. Without one (and without ``refresh``) the optimizer is plain
            ``optimizer_class`` until a state dict with a basis is loaded, and the first step warns about that. Pass
            ``egop.Basis([])``, a basis without blocks, to confirm that this is what you want.
        model: the module that owns the parameters, if ``params`` is not the module itself. It provides their names and
            their roles (embeddings, output heads, experts), from which ``refresh`` chooses what to rotate.
        outside: the optimizer class for parameters outside every block (embeddings, heads, norms, biases), or a pair of
            the class and its options; by default ``optimizer_class`` steps these too. It shares the learning rate, the
            weight decay (unless its options set one) and ``maximize`` of the groups; its other settings are in the
            groups as ``"outside/betas"`` and so on.
        refresh: how the basis is kept current: ``egop.Every(...)``, ``egop.Online(...)`` or ``egop.Aligned(...)``; by
            default it is fixed.
        **hyperparameters: arguments of ``optimizer_class``, including ``foreach`` and ``fused``.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> objective = egop.Objective(model, lambda m, batch: (m(batch[0]) - batch[1]).square().mean(), batches)
        >>> basis = egop.estimate(objective, progress=False)
        >>> optimizer = egop.ReparameterizedOptimizer(model.named_parameters(), torch.optim.AdamW, basis, lr=1e-3)
    """

    has_own_basis = True

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        basis: Basis | None = None,
        *,
        model: nn.Module | None = None,
        refresh: Refresh | None = None,
        outside: type[Optimizer] | tuple[type[Optimizer], Mapping[str, Any]] | None = None,
        **hyperparameters: Any,
    ) -> None:
        check_refresh(refresh, basis)
        if getattr(optimizer_class, "has_own_basis", False):
            name = optimizer_class.__name__
            raise TypeError(
                f"{name} runs an optimizer in a basis itself, so it cannot be the base optimizer. Call it with the "
                f"model: egop.{name}(model, ...)."
            )
        groups = name_groups(params, model=model)
        bases = [group.pop("basis", None) for group in groups]
        check_optimizer(optimizer_class)
        given = refresh is not None or any(each is not None for each in (basis, *bases))
        if outside is not None and not given:
            raise ValueError(
                f"outside= needs basis= or refresh=: without blocks it would step everything, and "
                f"{optimizer_class.__name__} nothing. Pass refresh=egop.Online() or basis=. To use "
                f"{optimizer_class.__name__} without a rotation, make one optimizer of each class."
            )
        # Frameworks copy attributes to wrappers, so everything is in one object, which wrapper and optimizer share.
        self._engine = engine = Engine(BaseOptimizer(optimizer_class, hyperparameters, outside))
        engine.may_be_plain = given
        engine.check_class(groups)
        super().__init__(groups, complete_hyperparameters(optimizer_class, groups[0], hyperparameters))
        module = params if model is None and isinstance(params, nn.Module) else model
        engine.known = None if module is None else ModuleIndex(module)
        engine.layers = find_roles(named_parameters(self.param_groups), engine.known)
        blocks = engine.bind(basis, self.param_groups)
        for index, group_basis in enumerate(bases):
            blocks += engine.bind(group_basis, self.param_groups[index : index + 1], first_group=index)
        check_disjoint([block.change.block for block in blocks])
        engine.excluded = {
            name: reason for each in (basis, *bases) if each is not None for name, reason in each.unrotated.items()
        }
        engine.build(blocks)
        if refresh is not None:
            engine.refresher = refresh.start(engine)
            engine.refresher.refresh = refresh
        for block in blocks:  # last, since it changes the model
            block.drop_rest()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups: the model's parameters and the hyper-parameters."""
        return self._engine.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.param_groups[:] = groups  # in the list that wrappers share

    @property  # type: ignore[override]
    @outside_inference_mode
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter: base optimizer state, refresh state, coordinates and basis.

        Its tensors are the optimizer's own. New values for the base optimizer's entries take effect at the next step.
        Use :meth:`rebase` to change a basis, and write to the parameter itself to move it. Read the state again after a
        step.
        """
        engine = self._engine
        if not engine.is_built:
            return {}
        if engine.exported is None:
            self._sync_external_changes()
            engine.wait_for_refresh()
            engine.exported = ExportedState(engine)
        states: dict[Tensor, dict[str, Any]] = engine.exported.states
        return states

    @state.setter
    def state(self, state: dict[Tensor, dict[str, Any]]) -> None:
        if self._engine.is_built:
            given, states = dict(state), self.state
            states.clear()
            states.update(given)

    @property
    def blocks(self) -> list[BoundBlock]:
        """The blocks with their parameters and coordinates."""
        return self._engine.blocks

    @property
    @outside_inference_mode
    def basis(self) -> Basis:
        """A copy of the current basis of each block, with the reasons why other weights have none."""
        self._engine.wait_for_refresh()
        blocks = self._engine.blocks
        return Basis(
            [
                block.whole_change({name: tensor.clone() for name, tensor in block.change.tensors.items()})
                for block in blocks
            ],
            {block.name: block.spectrum for block in blocks if block.spectrum is not None},
            self._engine.unrotated,
        )

    @property
    def plan(self) -> Plan:
        """The weights that are or will be rotated, their structures, and why others are not."""
        return display.make_plan(self._engine)

    def __repr__(self) -> str:
        name = type(self).__name__
        return display.format_line(name, self._engine) if self._engine.is_built else f"{name}(not initialized)"

    @outside_inference_mode
    def __str__(self) -> str:
        return display.format_text(type(self).__name__, self._engine) if self._engine.is_built else repr(self)

    @property
    def inner(self) -> Optimizer:
        """The optimizer that steps the coordinates, and everything else if there is no ``outside``."""
        return self._engine.inner.coordinates

    @property
    def refresher(self) -> Refresher | None:
        """The object that keeps the basis current and counts renewals."""
        return self._engine.refresher

    @outside_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters, which may have its own ``"basis"``.

        If the optimizer was given the model, the parameters need no names.
        """
        engine = self._engine
        if not engine.is_built:  # called by Optimizer.__init__, with groups that are already checked
            super().add_param_group(param_group)
            return
        self._sync_external_changes()
        taken = [name for group in self.param_groups for name in group["param_names"]]
        (group,) = name_groups([param_group], taken, engine.known)
        basis = group.pop("basis", None)
        engine.check_class([group])
        layers = find_roles(named_parameters([group]), engine.known)
        blocks = engine.bind(basis, [group], first_group=len(self.param_groups), layers=layers)
        check_disjoint([block.change.block for block in engine.blocks + blocks])
        super().add_param_group(group)
        try:
            engine.build(engine.blocks + blocks)
        except BaseException:
            del self.param_groups[-1]
            raise
        engine.layers |= layers
        for block in blocks:
            block.drop_rest()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of the base optimizer in coordinates.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            self._sync_external_changes()
            self._engine.step()
        return loss

    @outside_inference_mode
    @torch.no_grad()
    def rebase(self, basis: Basis, *, moments: Moments = "rotate") -> None:
        """Continue in another basis from the same point.

        Args:
            basis: new changes of basis for some or all of the blocks. A basis with other blocks, or blocks of another
                kind, replaces all of them; it needs ``moments="reset"`` once steps have been taken.
            moments: ``"rotate"`` moves the base optimizer's state to the new coordinates: vectors (momentum) and
                points (averages of weights) exactly, squared moments by the squared rotation; unknown state is an
                error. ``"keep"`` moves points only, ``"reset"`` resets the state. See :mod:`egop.optimizer.moments`.
        """
        self._sync_external_changes()
        before = self._engine.blocks
        self._engine.rebase(basis, moments=moments)
        if self.refresher is not None:
            self.refresher.on_rebase(list(basis), replaced=self._engine.blocks is not before)

    @outside_inference_mode
    def renew_basis(self) -> None:
        """Renew the basis now, from scratch, using ``refresh``."""
        if self.refresher is None:
            raise RuntimeError(
                "This optimizer has no refresh=, so it does not know how to renew a basis. See egop.Every."
            )
        self._sync_external_changes()
        self.refresher.renew(self._engine)

    def _sync_external_changes(self) -> None:
        """Apply edits of the state, and bind parameters that have been replaced in the groups."""
        engine, exported = self._engine, self._engine.exported
        engine.exported = None
        edits = {} if exported is None else exported.find_edits(engine)
        if edits or not engine.bound.matches(engine.param_groups):
            engine.wait_for_refresh()
            self._use(rebuild(engine, edits))

    @outside_inference_mode
    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly: hyper-parameters, inner state, bases and coordinates.

        Bases and coordinates are copies, since they belong to the current weights; the rest is the optimizer's own, as
        in every torch optimizer. With parameters sharded by rows (FSDP2) and bases renewed online, all processes must
        call this together.
        """
        self._sync_external_changes()
        self._engine.wait_for_refresh()
        self._engine.exported = ExportedState(self._engine, complete=True)
        try:
            return super().state_dict()  # which reads self.state
        finally:
            self._engine.exported = None

    @outside_inference_mode
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state dict, including its bases. If it does not fit, raise ValueError and change nothing."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"A state dict must be what optimizer.state_dict() returns, got {state_dict!r:.80}.")
        self._engine.wait_for_refresh()
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        parts, self.param_groups = parse_state_dict(self._engine, state_dict)
        self._use(parts)
        if parts.with_refresh and self.refresher is None:
            warnings.warn(
                "The bases were being renewed when this state was saved. This optimizer has no refresh=, so they stay "
                "fixed.",
                stacklevel=find_user_level(),
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __copy__(self) -> ReparameterizedOptimizer:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    @outside_inference_mode
    def __getstate__(self) -> dict[str, Any]:
        self._sync_external_changes()
        return {"defaults": self.defaults, "_engine": self._engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_engine" not in state:
            raise TypeError("Load a state with optimizer.load_state_dict(state_dict), not with __setstate__.")
        super().__setstate__(state)

    def _use(self, parts: RestoredParts) -> None:
        """Install the parts that were restored from a state."""
        self._engine.exported = None
        if self.refresher is not None and parts.refresher is not None:
            self.refresher.__dict__.update(parts.refresher.__dict__)
        self._engine.build(parts.blocks, parts.pieces, parts.inner)

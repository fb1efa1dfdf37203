"""ReparameterizedOptimizer: any coordinate-wise torch optimizer, run in another basis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egop.basis import Basis, Known, Layer, Plan, check_disjoint, layers_of, plain_name
from egop.distributed import LocalShards
from egop.numerics import check_number, outside_inference_mode, without_autocast
from egop.optimizer import showing
from egop.optimizer.base import SHARED, Base
from egop.optimizer.binding import BoundBlock
from egop.optimizer.engine import Engine
from egop.optimizer.groups import named_groups
from egop.optimizer.inner import check_optimizer, defaults_of, warn_of_no_gain
from egop.optimizer.loaded import warn_of_loaded
from egop.optimizer.moments import Moments
from egop.optimizer.refreshing import Refresh, Refresher, check_refresh
from egop.optimizer.restoring import Restored, parsed, rebound
from egop.optimizer.stacks import Stacks
from egop.optimizer.states import Entry, Published, exported

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class _Passing:
    """What is under way between an optimizer and those who look at its state or load one."""

    published: Published | None = None  # the state, since someone has looked at it
    complete: dict[Tensor, Entry] | None = None  # while a state dict is made
    arriving: Restored | None = None  # while one is loaded


class ReparameterizedOptimizer(Optimizer):
    r"""Runs an optimizer on :math:`f \circ V` while the model keeps its own parameters.

    Every step encodes the gradients (:math:`V^\top g`), lets the inner optimizer step in coordinates and writes the
    decoded coordinates (:math:`V \tilde\theta`) back: exactly the inner optimizer on the reparameterised objective.

    The ``param_groups`` hold the model's own parameters and own the hyper-parameters, so schedulers, gradient clipping,
    ``GradScaler`` and hooks work as with any optimizer. Parameters outside every block are stepped as they are.
    Parameters in half precision have float32 coordinates, which serve as master weights.

    A parameter that is changed from outside between steps (loaded, averaged, clipped) is noticed by its version counter
    and encoded again. Writes through ``parameter.data`` bypass that counter: they are noticed on the CPU, where looking
    at the values is cheap; on other devices write under ``torch.no_grad()`` to the parameter itself.

    Args:
        params: a module, ``model.named_parameters()``, or parameter groups of named parameters; a group may bring a
            ``"basis"`` of its own. With ``model`` the parameters need no names.
        optimizer_class: any ``torch.optim`` class, or another ``Optimizer`` class, that works coordinate by coordinate.
        basis: the change of basis of each block; without one (and without ``refresh``) the optimizer does what
            ``optimizer_class`` does, until a state dict with a basis is loaded, and the first step warns of that. A
            basis without blocks, ``egop.Basis([])``, says that it is meant so.
        model: the module whose parameters these are, where ``params`` is not the module itself: it tells their names,
            and what they are (embeddings, output heads, experts), by which ``refresh`` chooses what to rotate.
        outside: the optimizer class for what no block has (embeddings, heads, norms, biases), or a pair of it and its
            options; by default ``optimizer_class`` steps these too. It has the learning rate, the weight decay (if its
            options have none) and ``maximize`` of the groups; its other settings are there as ``"outside/betas"`` ...
        refresh: when the basis is renewed: ``egop.Every(...)``, ``egop.Online(...)`` or
            ``egop.Aligned(...)``; never by default.
        compile: whether the basis products of a step go through ``torch.compile``.
        any_class: whether to run a class that was tried and found not to work coordinate by coordinate (``SOAP``,
            ``Adafactor``) on the coordinates nonetheless, whatever their shape. A class that is meant for coordinates
            that are matrices (those of ``Shared`` and ``Kronecker``) says so by its ``works_on_matrices = True``.
        **hyperparameters: handed to ``optimizer_class``, ``foreach`` and ``fused`` too.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> objective = egop.Objective(model, lambda m, batch: (m(batch[0]) - batch[1]).square().mean(), batches)
        >>> basis = egop.estimate(objective, progress=False)
        >>> optimizer = egop.ReparameterizedOptimizer(model.named_parameters(), torch.optim.AdamW, basis, lr=1e-3)
    """

    # What the optimizer outside takes from the groups: settings that mean the same to both.
    _shared_settings: tuple[str, ...] = SHARED

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        basis: Basis | None = None,
        *,
        model: nn.Module | None = None,
        refresh: Refresh | None = None,
        outside: type[Optimizer] | tuple[type[Optimizer], Mapping[str, Any]] | None = None,
        compile: bool = False,
        any_class: bool = False,
        **hyperparameters: Any,
    ) -> None:
        check_refresh(refresh, basis)
        groups = named_groups(params, model=model)
        bases = [group.pop("basis", None) for group in groups]
        check_optimizer(optimizer_class)
        for name in ("lr", "weight_decay"):
            check_number(name, hyperparameters.get(name))
        if issubclass(optimizer_class, ReparameterizedOptimizer):
            name = optimizer_class.__name__
            raise TypeError(
                f"{name} runs an optimizer in a basis itself, and cannot run in another. Call it with the model: "
                f"egop.{name}(model, ...)."
            )
        given = refresh is not None or any(each is not None for each in (basis, *bases))
        if outside is not None and not given:
            raise ValueError(
                "outside= is for what no block has, and without basis= and refresh= there are no blocks: it would step "
                f"everything, and {optimizer_class.__name__} nothing. Give refresh=egop.Online() or basis=; or, to use "
                f"{optimizer_class.__name__} without a rotation, make one optimizer of each class."
            )
        # Frameworks copy these attributes into wrappers, so that both work with the same two objects.
        self._engine = engine = Engine(
            Base(optimizer_class, hyperparameters, outside, self._shared_settings),
            compiled=compile,
            any_class=any_class,
        )
        self._passing = _Passing()
        engine.bare = not given
        engine.check_class(groups)
        super().__init__(groups, defaults_of(optimizer_class, groups[0], hyperparameters))
        module = params if model is None and isinstance(params, nn.Module) else model
        engine.known = None if module is None else Known(module)
        engine.layers = _layers_of(self.param_groups, engine.known)
        blocks = engine.bind(basis, self.param_groups)
        for index, group_basis in enumerate(bases):
            blocks += engine.bind(group_basis, self.param_groups[index : index + 1], first_group=index)
        check_disjoint([block.change.block for block in blocks])
        engine.left = {
            name: why for each in (basis, *bases) if each is not None for name, why in each.unrotated.items()
        }
        engine.build(blocks, LocalShards())
        if refresh is not None:
            engine.refresher = refresh.start(engine)
            engine.refresher.refresh = refresh
        if not engine.gains:
            warn_of_no_gain(optimizer_class, blocks, refresh)
        for block in blocks:  # last, since it changes the model: nothing is to change when something was refused
            block.drop_rest()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups: the model's parameters and the hyper-parameters."""
        return self._engine.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._engine.param_groups[:] = groups  # in the list that everyone has who has this optimizer

    @property  # type: ignore[override]
    @outside_inference_mode
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter: the inner optimizer's, coordinates, basis, and what the refresh remembers.

        Its tensors are those that are worked with. Another value for an entry of the inner optimizer's, or for
        coordinates, is taken at the next step; a basis is changed by :meth:`rebase`. After a step, ask for it again.
        """
        engine, passing = self._engine, self._passing
        if not engine.is_built:
            return {}
        if passing.complete is not None:
            return passing.complete
        if passing.published is None:
            self._attend()
            engine.settle()
            passing.published = Published(engine)
        return passing.published.states

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
        """A copy of the change of basis of each block as it is now, and why other weights have none."""
        self._engine.settle()
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
        """Which weights are rotated, in which structure, and why; before the first step, which ones will be."""
        return showing.plan_of(self._engine)

    @outside_inference_mode
    def plot_spectra(self) -> Figure:
        """Plot the spectra of all blocks: of their basis, or of the gradients that it follows."""
        self._engine.settle()
        return showing.plot(self._engine)

    def __repr__(self) -> str:
        """In a line: what runs inside, how many blocks, the refresh, the learning rate."""
        name = type(self).__name__
        return showing.line(name, self._engine) if self._engine.is_built else f"{name}(not made yet)"

    @outside_inference_mode
    def __str__(self) -> str:
        """Several lines: what runs inside, the refresh and its counts, the groups, and a table of the blocks."""
        return showing.as_text(type(self).__name__, self._engine) if self._engine.is_built else repr(self)

    @outside_inference_mode
    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return showing.as_html(type(self).__name__, self._engine) if self._engine.is_built else escape(repr(self))

    @property
    def stacks(self) -> Stacks:
        """The blocks, stacked by kind and shape."""
        return self._engine.stacks

    @property
    def inner(self) -> Optimizer:
        """The optimizer that runs on the coordinates (and on the parameters outside every block)."""
        return self._engine.inner

    @property
    def refresher(self) -> Refresher | None:
        """What renews the basis, and its counts."""
        return self._engine.refresher

    @property
    def layers(self) -> dict[str, Layer]:
        """What each parameter is."""
        return self._engine.layers

    @outside_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters; with ``"basis": egop.Basis`` in it, in that basis.

        Parameters of the model that the optimizer was given need no names.
        """
        engine = self._engine
        if not engine.is_built:  # called by Optimizer.__init__, with groups that are already checked
            super().add_param_group(param_group)
            return
        self._attend()
        taken = [name for group in self.param_groups for name in group["param_names"]]
        (group,) = named_groups([param_group], taken, engine.known)
        basis = group.pop("basis", None)
        engine.check_class([group])
        layers = _layers_of([group], engine.known)
        blocks = engine.bind(basis, [group], first_group=len(self.param_groups), layers=layers)
        check_disjoint([block.change.block for block in engine.blocks + blocks])
        super().add_param_group(group)
        try:
            engine.add_group(blocks)
        except BaseException:
            del self.param_groups[-1]
            engine.base.drop_beyond(self.param_groups, self.inner)
            raise
        engine.layers |= layers
        for block in blocks:
            block.drop_rest()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer in coordinates.

        Args:
            closure: reevaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            self._attend()
            self._engine.step()
        return loss

    @outside_inference_mode
    @torch.no_grad()
    def rebase(self, basis: Basis, *, moments: Moments = "rotate") -> None:
        """Go on in another basis, from the same point.

        Args:
            basis: new changes of basis for some or all of the blocks. One with other blocks, or blocks of another kind,
                replaces all of them; it needs ``moments="reset"`` once steps have been taken.
            moments: ``"rotate"`` carries the inner optimizer's state into the new coordinates: vectors (momentum) and
                points (averages of weights, ``z`` of schedule-free optimizers) exactly, squared moments by the squared
                rotation; what is not known is an error. ``"keep"`` leaves all but points as it is, ``"reset"`` starts
                it anew. See :mod:`egop.optimizer.moments` for each kind of state.
        """
        self._attend()
        before = self._engine.blocks
        self._engine.rebase(basis, moments=moments)
        if self.refresher is not None:
            self.refresher.on_rebase(list(basis), replaced=self._engine.blocks is not before)

    @property
    def train(self) -> Callable[[], None]:
        """The inner optimizer's ``train``, if it has one (schedule-free optimizers do): the training weights."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """The inner optimizer's ``eval``, if it has one: the model gets the weights to be evaluated and saved."""
        return self._mode("eval")

    def _mode(self, name: str) -> Callable[[], None]:
        engine = self._engine
        if not engine.is_built or not callable(getattr(engine.inner, name, None)):
            # So that hasattr says what holds for the inner optimizer.
            raise AttributeError(f"{engine.base.optimizer_class.__name__} has no {name}()")
        return partial(self._switch, name)

    @outside_inference_mode
    @torch.no_grad()
    def _switch(self, name: str) -> None:
        if all(group.get("train_mode") is (name == "train") for group in self.param_groups):
            return  # that is where it is: trainers ask before every step
        self._attend()
        with without_autocast():
            self._engine.switch(name)

    @outside_inference_mode
    def renew_basis(self) -> None:
        """Renew the basis now, from scratch, in the way that ``refresh`` says."""
        if self.refresher is None:
            raise RuntimeError("This optimizer has no refresh=, which says how a basis is renewed. See egop.Every.")
        self._attend()
        self.refresher.renew(self._engine)

    def _attend(self) -> None:
        """Follow what others have done to the optimizer: written to its state, or given it other parameters."""
        engine, published = self._engine, self._passing.published
        if published is not None:
            engine.settle()
            self._passing.published = None
            published.take_in(engine)
        if not engine.bound.are(engine.param_groups):
            engine.settle()
            self._use(rebound(engine))

    @outside_inference_mode
    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly: hyper-parameters, the inner optimizer's state, bases and coordinates.

        Bases and coordinates are copies, since they belong to the weights of this moment; the rest moves on with the
        optimizer, as with every torch optimizer. Where parameters are cut by rows (FSDP2) and bases renewed online, all
        processes call this together.
        """
        self._attend()
        self._engine.settle()
        self._passing.complete = exported(self._engine, complete=True)
        try:
            return super().state_dict()
        finally:
            self._passing.complete = None

    @outside_inference_mode
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict, in the bases that it holds. Nothing changes when it does not fit."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"A state dict must be a dict as optimizer.state_dict() gives it, got {state_dict!r:.80}.")
        self._engine.settle()
        # The last hook to be called sees what the others have left of the state; torch then takes the groups.
        handle = self.register_load_state_dict_pre_hook(_take_apart)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
            self._passing.arriving = None

    def __copy__(self) -> ReparameterizedOptimizer:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    @outside_inference_mode
    def __getstate__(self) -> dict[str, Any]:
        self._attend()
        return {"defaults": self.defaults, "_engine": self._engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies; torch also comes here with the parameter groups that it has loaded."""
        if "_engine" in state:
            super().__setstate__(state | {"_passing": _Passing()})
            return
        parts = self._passing.arriving
        if parts is None:
            raise TypeError("A state is loaded by optimizer.load_state_dict(state_dict), not by __setstate__.")
        before = self._engine.blocks
        self.param_groups = state["param_groups"]
        self._use(parts)
        warn_of_loaded(parts.with_refresh, self._engine.blocks, before, self.refresher)

    def _use(self, parts: Restored) -> None:
        """Take working parts that were built from a state."""
        self._passing.published = None
        if self.refresher is not None and parts.refresher is not None:
            self.refresher.__dict__.update(parts.refresher.__dict__)
        self._engine.build(parts.blocks, parts.pieces, parts.inner)


def _layers_of(groups: Iterable[Mapping[str, Any]], known: Known | None) -> dict[str, Layer]:
    """Return what each parameter of these groups is, by its plain name."""
    pairs = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    return layers_of({plain_name(name): parameter for name, parameter in pairs}, known)


def _take_apart(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Build all that a state dict stands for, before anything is changed; what is left for torch are the groups."""
    assert isinstance(optimizer, ReparameterizedOptimizer)
    optimizer._passing.arriving, groups = parsed(optimizer._engine, state_dict)
    return {"state": {}, "param_groups": groups}

"""ReparameterizedOptimizer: any coordinate-wise torch optimizer, run in another basis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egop.batches import Batch, Batches
from egop.binding import BoundBlock, bind
from egop.groups import named_groups
from egop.inner import check_class, copy_hyperparameters
from egop.moments import Moments, check_moments, check_movable
from egop.objective import plain_name
from egop.precision import without_autocast
from egop.refresh import Refresh, Refresher
from egop.refresh.base import check_refresh
from egop.refresh.loaded import warn_of_loaded
from egop.reparameterization import Reparameterization
from egop.roles import Known, layers_of
from egop.sharding import Pieces
from egop.states import STATE_VERSION, check_state, fresh_states, inner_shapes, inner_state, load_inner_state, shapes_of
from egop.structures import rebuild

_OWN = ("_class", "_hyperparameters", "_inner", "_blocks", "_pieces", "_compiled", "layers", "refresher")


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
            ``optimizer_class`` does, until a state dict with a basis is loaded.
        model: the module whose parameters these are, where ``params`` is not the module itself: it tells their names,
            and what they are (embeddings, output heads, experts), by which ``refresh`` chooses what to rotate.
        refresh: when the basis is renewed: ``egop.Every(...)``, ``egop.Online(...)`` or ``egop.WhenDrifted(...)``;
            never by default.
        compile: whether the basis products of a step go through ``torch.compile``.
        **hyperparameters: handed to ``optimizer_class``, ``foreach`` and ``fused`` too.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 2))]
        >>> objective = egop.Objective(model, lambda m, batch: (m(batch[0]) - batch[1]).square().mean(), batches)
        >>> basis = egop.estimate(objective, progress=False)
        >>> optimizer = egop.ReparameterizedOptimizer(model.named_parameters(), torch.optim.AdamW, basis, lr=1e-3)
    """

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        basis: Reparameterization | None = None,
        *,
        model: nn.Module | None = None,
        refresh: Refresh | None = None,
        compile: bool = False,
        **hyperparameters: Any,
    ) -> None:
        check_class(optimizer_class)
        check_refresh(refresh, basis)
        groups = named_groups(params, model=model)
        bases = [group.pop("basis", None) for group in groups]
        # An optimizer of one throw-away number: it checks the hyper-parameters and completes them with its defaults.
        template = optimizer_class([torch.zeros(1, requires_grad=True)], **hyperparameters)
        self._class = optimizer_class
        self._hyperparameters = hyperparameters
        self._compiled = compile
        self._inner: Optimizer | None = None
        self._blocks: list[BoundBlock] = []
        self._pieces = Pieces()
        self._batched: Batches | None = None
        self.refresher: Refresher | None = None
        super().__init__(groups, dict(template.defaults))
        self._blocks = bind(basis, self.param_groups)
        for index, own in enumerate(bases):
            self._blocks += bind(own, self.param_groups[index : index + 1], first_group=index)
        Reparameterization([block.change for block in self._blocks])  # checks that no two blocks share a parameter
        self._build()
        named = [
            pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)
        ]
        module = params if model is None and isinstance(params, nn.Module) else model
        self._known = None if module is None else Known(module)
        self.layers = layers_of({plain_name(name): parameter for name, parameter in named}, self._known)
        if refresh is not None:
            self.refresher = refresh.begin(self)
            self.refresher.refresh = refresh
        for block in self._blocks:  # last, since it changes the model: nothing is to change when something was refused
            block.drop_rest()

    @property
    def blocks(self) -> list[BoundBlock]:
        """The blocks with their parameters and coordinates."""
        return self._blocks

    @property
    def basis(self) -> Reparameterization:
        """A copy of the change of basis of each block as it is now."""
        self._settle()
        return Reparameterization([block.whole_change(_cloned(block.change.tensors)) for block in self._blocks])

    @property
    def batches(self) -> Batches:
        """The blocks, batched by kind and shape: when they are wanted, not for each of many groups that are added."""
        if self._batched is None:
            # torch's own optimizers keep no gradient for the next step; of others nobody knows.
            reused = self._class.__module__.startswith("torch.optim")
            self._batched = Batches(self._blocks, compiled=self._compiled, reused=reused)
        return self._batched

    @property
    def inner(self) -> Optimizer:
        """The optimizer that runs on the coordinates (and on the parameters outside every block)."""
        assert self._inner is not None
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters; with ``"basis": egop.Reparameterization`` in it, in that basis.

        Parameters of the model that the optimizer was given need no names.
        """
        if self._inner is None:  # called by Optimizer.__init__, with groups that are already checked
            super().add_param_group(param_group)
            return
        self._settle()
        taken = [name for each in self.param_groups for name in each["param_names"]]
        (group,) = named_groups([param_group], taken, self._known)
        blocks = bind(group.pop("basis", None), [group], first_group=len(self.param_groups))
        Reparameterization([block.change for block in self._blocks + blocks])  # checks that no two share a name
        super().add_param_group(group)
        names = map(plain_name, group["param_names"])
        self.layers |= layers_of(dict(zip(names, group["params"], strict=True)), self._known)
        for block in blocks:
            block.drop_rest()
        self._blocks += blocks
        self.inner.add_param_group(self._inner_group(len(self.param_groups) - 1))
        self._batched = None

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
            self._step()
        return loss

    def _step(self) -> None:
        if self.refresher is not None:
            self.refresher.before_step(self)
        copy_hyperparameters(self.param_groups, self.inner.param_groups)
        try:
            self.batches.collect()
            self._pieces.pull()
            if self.refresher is not None:
                self.refresher.observe(self)
            self.batches.encode_gradients()
            self._step_coordinates()
        finally:
            self.batches.drop_gradients()
            self._pieces.drop_gradients()
        # Some optimizers keep quantities of their own (an estimated step size, a counter) in their groups.
        copy_hyperparameters(self.inner.param_groups, self.param_groups)
        if self.refresher is not None:
            self.refresher.after_step(self)

    @torch.no_grad()
    def rebase(self, basis: Reparameterization, *, moments: Moments = "rotate") -> None:
        """Go on in another basis, from the same point.

        Args:
            basis: new changes of basis for some or all of the blocks. One with other blocks, or blocks of another kind,
                replaces all of them; it needs ``moments="reset"`` once steps have been taken.
            moments: ``"rotate"`` carries the inner optimizer's moments into the new coordinates (linear ones exactly,
                squared ones by the squared rotation, see :mod:`egop.moments`), ``"keep"`` leaves them as they are,
                ``"reset"`` starts them anew.
        """
        check_moments(moments)
        self._settle()
        own = {block.name: block for block in self._blocks}
        if not all(name in own and own[name].whole_change().alike(change) for name, change in basis.items()):
            self._replace_blocks(bind(basis, self.param_groups), moments)
            return
        if moments == "rotate":
            check_movable(
                self.inner.state.get(coordinate, {}) for block in own.values() for coordinate in block.coordinates
            )
        for batch, members, tensors in self.batches.moved(basis):
            self.turn(batch, members, tensors, moments)

    def turn(self, batch: Batch, members: slice, tensors: Mapping[str, Tensor], moments: Moments) -> None:
        """Go on in other bases of some blocks of one batch: what :meth:`rebase` does, without its checks.

        Args:
            batch: one of :attr:`batches`.
            members: which of its blocks.
            tensors: their new bases, stacked.
            moments: as in :meth:`rebase`.
        """
        batch.turn(members, tensors, self.inner.state, rotate=moments == "rotate", still=self.batches.still)
        if moments == "reset":
            for block in batch.blocks[members]:
                fresh = fresh_states(self.inner, block, self._hyperparameters)
                self.inner.state.update(zip(block.coordinates, fresh, strict=True))

    def renew_basis(self) -> None:
        """Renew the basis now, from scratch, in the way that ``refresh`` says."""
        if self.refresher is None:
            raise RuntimeError("This optimizer has no refresh=, which says how a basis is renewed. See egop.Every.")
        self.refresher.renew(self)

    def _step_coordinates(self) -> None:
        try:
            self.inner.step()
            self.batches.decode_coordinates()
        except BaseException:  # some coordinates may have been stepped already
            for block in self._blocks:
                block.distrust()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly: hyper-parameters, the inner optimizer's state, bases and coordinates."""
        self._settle()
        state = super().state_dict()
        state["state"] = inner_state(self.inner, self._blocks, self._pieces)
        state["egop"] = {
            "version": STATE_VERSION,
            "optimizer": self._class.__name__,
            "shapes": shapes_of(self.param_groups),
            "inner": inner_shapes(self.inner, self._blocks, self._pieces),
            "blocks": [
                block.whole_change().describe()
                | {"tensors": dict(block.change.tensors)}
                | {"coordinates": [block.spread(*each) for each in enumerate(block.coordinates)]}
                | {"rest": block.rest, "stand_for": block.stand_for()}
                for block in self._blocks
            ],
            "refresh": None if self.refresher is None else self.refresher.state_dict(),
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict, in the bases that it holds. Nothing changes when it does not fit."""
        self._settle()
        kept = dict(self.__dict__)
        try:
            self._load(state_dict)
        except Exception as error:
            self.__dict__.update(kept)
            if isinstance(error, ValueError):
                raise
            raise ValueError(
                f"The state dict is incomplete or damaged ({type(error).__name__}: {error}). "
                "Load one as optimizer.state_dict() gave it."
            ) from error
        warn_of_loaded(state_dict["egop"]["refresh"], self._blocks, kept["_blocks"], self.refresher)

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_state(state_dict, self.param_groups, self._class)
        saved = state_dict["egop"]
        basis = Reparameterization([rebuild(each, _cloned(each["tensors"])) for each in saved["blocks"]])
        blocks = bind(basis, self.param_groups)
        for block, each in zip(blocks, saved["blocks"], strict=True):
            block.restore(each["coordinates"], each["rest"], each["stand_for"])
        super().load_state_dict({**state_dict, "state": {}})
        self._blocks = blocks
        self._build()
        if inner_shapes(self.inner, self._blocks, self._pieces) != saved["inner"]:  # state goes by position
            raise ValueError("The state dict is incomplete or damaged: its blocks are not those that it has state of.")
        load_inner_state(self.inner, state_dict["state"])
        if self.refresher is not None and saved["refresh"] is not None:
            self.refresher.load_state_dict(saved["refresh"])
        elif self.refresher is not None:
            self.refresher.reset()

    def __copy__(self) -> ReparameterizedOptimizer:
        twin = type(self).__new__(type(self))
        assert self.batches is not None  # made before both would make their own
        twin.__dict__.update(self.__dict__)  # batches too: their memory is that of the coordinates
        return twin

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return super().__getstate__() | {name: self.__dict__[name] for name in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_known", None)  # a copy is not of the model, nor takes it along
        if "_blocks" in state:  # a copy; torch also comes here while it loads parameter groups
            self._batched = None

    def _replace_blocks(self, blocks: list[BoundBlock], moments: Moments) -> None:
        if moments != "reset" and any(self.inner.state.values()):
            raise ValueError(
                "The new basis has other blocks, or blocks of another kind, than the one in use, so moments cannot be "
                "carried over. Use rebase(basis, moments='reset')."
            )
        kept = dict(self.inner.state)
        for block in blocks:
            block.drop_rest()
        self._blocks = blocks
        self._build()
        inside = {tensor for group in self.inner.param_groups for tensor in group["params"]}
        self.inner.state.update({tensor: state for tensor, state in kept.items() if tensor in inside})

    def _build(self) -> None:
        """Make the inner optimizer over the coordinates and the parameters outside every block."""
        groups = [self._inner_group(index) for index in range(len(self.param_groups))]
        self._inner = self._class(groups, **self._hyperparameters)
        self._batched = None

    @torch.no_grad()
    def _settle(self) -> None:
        if self.refresher is not None:
            self.refresher.settle(self)

    def _inner_group(self, index: int) -> dict[str, Any]:
        group = {key: value for key, value in self.param_groups[index].items() if key != "param_names"}
        blocks = {id(owner): block for block in self._blocks for owner in block.owners}
        members: dict[int, Tensor] = {}  # in the order of the group, a block where its first parameter stands
        for parameter in group["params"]:
            inside = blocks[id(parameter)].coordinates if id(parameter) in blocks else [self._pieces.of(parameter)]
            members |= {id(tensor): tensor for tensor in inside}
        return group | {"params": list(members.values())}


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}

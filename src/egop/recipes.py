"""EGOP: the recommended optimizer, as one class that takes the place of AdamW."""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from egop.basis import Basis, Block, Identity, ModuleIndex, Plan, Role, Shared, find_roles, match
from egop.distributed import is_sharded, to_local
from egop.formatting import pluralize
from egop.numerics import outside_inference_mode, without_autocast
from egop.optim import PolarAdam, RotatedPolarAdam
from egop.optimizer import find_user_level, name_groups
from egop.state_dicts import check_state_dict

__all__ = ["EGOP"]

_WIDEST = 8192  # a weight whose sides are both wider is left to AdamW: its polar factor would take too long
_UPDATE_RMS = 0.2  # root mean square of an update of a matrix, before the learning rate
_MOMENTS = ("exp_avg", "exp_avg_sq")


class EGOP(Optimizer):
    """PolarAdam in an eigenbasis of the momentum for weight matrices, and AdamW for everything else.

    Use it in place of AdamW, with the same learning rate and weight decay.

    Weights of linear layers, convolutions, attention and experts are stepped by :class:`egop.optim.PolarAdam` in
    coordinates in which their momentum has uncorrelated rows: the smaller side of each weight is rotated, and the
    rotation is renewed every ``every`` steps. AdamW steps embeddings, output heads, norms and biases.
    ``print(optimizer.plan)`` shows which weights are rotated, and why others are not.

    Weights in half precision have float32 copies, which are stepped in their place. With FSDP2, the moments are sharded
    like the weights.

    Args:
        params: a module; or ``model.named_parameters()`` or parameter groups, together with ``model``.
        lr: learning rate; AdamW's best one works.
        betas: decay of the running means of gradients and of their squares, for all parameters.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay for all parameters. To exclude norms and biases, put them in a group of
            their own.
        rotate: set to False to run the same base optimizer on the same weights without a rotation.
        every: number of steps between renewals of a rotation.
        exclude: name patterns, such as ``"*.gate.weight"``, of weights to leave to AdamW.
        model: the module that owns the parameters, if ``params`` is not a module; it determines their roles.
        foreach: passed to AdamW.
        fused: passed to AdamW.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        >>> optimizer = egop.EGOP(model, lr=1e-3)
        >>> model(torch.ones(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer
        EGOP(1 rotated weight, AdamW for 3 other parameters, lr=0.001)
        >>> optimizer.plan.unrotated
        {'2.weight': 'the output head'}
    """

    has_own_basis = True  # so that egop.ReparameterizedOptimizer refuses to run it in another one

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rotate: bool = True,
        every: int = 20,
        exclude: Sequence[str] = (),
        model: nn.Module | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.defaults = settings | {"rotate": rotate, "every": every, "foreach": foreach, "fused": fused}
        self._reset_engine()  # checks the settings
        groups = name_groups(params, model=model)
        module = params if model is None and isinstance(params, nn.Module) else model
        self._index = None if module is None else ModuleIndex(module)
        self._exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._stacked: dict[str, int] = {}  # the matrices by name, with the number of dimensions that count them
        self._left: dict[str, str] = {}  # why other weights are left to AdamW
        self._is_built = False
        super().__init__(groups, self.defaults)
        self._is_built = True
        match(self._exclude, [*self._stacked, *self._left], "weight")
        self._warn_of_choice()

    @property
    def plan(self) -> Plan:
        """The weights that are rotated, and why others are not."""
        structure = Shared(side="smaller") if self.defaults["rotate"] else Identity()
        blocks = [
            _make_block(name, parameter, self._stacked[name])
            for name, parameter in self._named_parameters()
            if name in self._stacked
        ]
        return Plan(dict.fromkeys(blocks, structure), {block.name: "a weight matrix" for block in blocks}, self._left)

    @property
    @outside_inference_mode
    def basis(self) -> Basis:
        """A copy of the current basis of each weight that has been stepped; empty without a rotation."""
        changes = [
            Shared(side="smaller").change(
                _make_block(name, parameter, self._stacked[name]), {"basis": self.state[parameter]["basis"].clone()}
            )
            for name, parameter in self._named_parameters()
            if "basis" in self.state.get(parameter, {})
        ]
        return Basis(changes, unrotated=self._left)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters. If the optimizer was given the model, its parameters need no names."""
        if self._is_built:
            taken = [name for name, _ in self._named_parameters()]
            (param_group,) = name_groups([param_group], taken, self._index)
        for option in ("maximize", "amsgrad", "capturable", "differentiable"):
            if param_group.get(option):
                raise ValueError(f"egop.EGOP has no option {option}. Remove it from the parameter group.")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        named = dict(zip(group["param_names"], group["params"], strict=True))
        for name, role in find_roles(named, self._index).items():
            self._choose(name, named[name], role)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            matrices: dict[tuple[int, bool], list[Tensor]] = {}
            for index, group in enumerate(self.param_groups):
                others = []
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if parameter.grad is None or not parameter.numel():
                        continue
                    if name in self._stacked:
                        matrices.setdefault((index, self._stacked[name] > 0), []).append(parameter)
                    else:
                        others.append(parameter)
                self._step_adamw(group, others)
            self._step_matrices(matrices)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of an optimizer with the same parameters and the same ``rotate``.

        Raises:
            ValueError: if it does not fit. Nothing is changed then.
        """
        check_state_dict(state_dict, self.param_groups, _make_engine, self._expect_shapes)
        super().load_state_dict(dict(state_dict))
        # torch casts the state to the parameter's dtype, and keeps the given tensors where nothing is cast. But weights
        # in half precision have float32 state, and several optimizers may load one state dict.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, (name, parameter) in zip(saved, self._named_parameters(), strict=True):
            if key not in state_dict["state"]:
                continue
            if name in self._stacked:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self.state[parameter] = {
                    entry: value.detach().to("cpu" if entry == "step" else parameter.device, dtype, copy=True)
                    for entry, value in state_dict["state"][key].items()
                }
            else:
                self.state[parameter] = {entry: value.clone() for entry, value in self.state[parameter].items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; the model is left out."""
        choice = {"_stacked": self._stacked, "_left": self._left, "_exclude": self._exclude}
        return super().__getstate__() | choice

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a loaded state."""
        super().__setstate__({"_index": None, "_is_built": True} | state if "_stacked" in state else state)
        self._reset_engine()

    def __repr__(self) -> str:
        matrices = pluralize(len(self._stacked), "rotated weight" if self.defaults["rotate"] else "unrotated weight")
        others = pluralize(len(self._named_parameters()) - len(self._stacked), "other parameter")
        rates = " and ".join(dict.fromkeys(f"{float(group['lr']):g}" for group in self.param_groups))
        return f"{type(self).__name__}({matrices}, AdamW for {others}, lr={rates})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.plan}"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.plan._repr_html_()}"

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        return [pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)]

    def _reset_engine(self) -> None:
        self._engine = _make_engine(self.defaults)
        self._settings: dict[tuple[int, bool], dict[str, Any]] = {}  # the engine's, by group and kind of weight

    def _choose(self, name: str, parameter: Tensor, role: Role) -> None:
        """Decide which optimizer steps a parameter."""
        if role.kind in ("bias", "norm"):
            return
        sides = _matrix_shape(parameter, role.stacked)
        if parameter.is_complex():
            self._left[name] = "complex numbers"
        elif role.skip_reason:
            self._left[name] = role.skip_reason
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in self._exclude):
            self._left[name] = "excluded"
        elif min(sides) > _WIDEST:
            self._left[name] = f"both sides are wider than {_WIDEST}"
        else:
            self._stacked[name] = role.stacked

    def _warn_of_choice(self) -> None:
        if self._index is None:
            rotated, left = _join(self._stacked), _join(f"{name} ({why})" for name, why in self._left.items())
            warnings.warn(
                "egop.EGOP chooses weights by their roles. Without the model, the roles were guessed from names and "
                f"shapes. Weights to rotate: {rotated}. Left to AdamW: {left}. Pass the model itself, or model=model "
                "beside the parameters.",
                stacklevel=find_user_level(),
            )
        elif not self._stacked:
            left = _join(f"{name} ({why})" for name, why in self._left.items())
            warnings.warn(
                f"egop.EGOP found no weight matrix, so AdamW steps all parameters. Left to AdamW: {left}, and biases "
                "and norms.",
                stacklevel=find_user_level(),
            )

    def _step_matrices(self, matrices: Mapping[tuple[int, bool], list[Tensor]]) -> None:
        """Step the weight matrices of each group, those that are stacks of matrices apart."""
        parts, copies = [], []
        self._engine.state.clear()
        for key, parameters in matrices.items():
            group, settings = self.param_groups[key[0]], self._settings.setdefault(key, {})
            own = {"betas": group["betas"], "every": group["every"], "matrices_last": key[1]}
            settings.update(self._engine.defaults | own | _numbers(group))
            weights, gradients = [], []
            for parameter in parameters:
                gradient = _dense_gradient(parameter)
                weight = self._find_master(parameter)
                # The engine steps the copy of a weight in half precision, with the state of the weight itself.
                self._engine.state[weight] = self.state[parameter]
                if weight is not parameter:
                    gradient = gradient.float()
                    copies.append((parameter, weight))
                if is_sharded(weight):
                    self._engine.step_sharded(settings, weight, gradient)
                else:
                    weights.append(weight)
                    gradients.append(gradient)
            if weights:
                parts.append((settings, weights, gradients))
        self._engine.step_parts(parts)
        for parameter, weight in copies:
            to_local(parameter).copy_(to_local(weight))

    def _find_master(self, parameter: Tensor) -> Tensor:
        """Return the float32 copy of a weight in half precision, and any other weight itself."""
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        state = self.state[parameter]
        if "master" not in state:
            state["master"] = parameter.detach().float()
        master: Tensor = state["master"]
        # Entries that someone else has changed no longer round to the weight's.
        local, values = to_local(master), to_local(parameter)
        local.copy_(torch.where(local.to(values.dtype) == values, local, values.float()))
        return master

    def _step_adamw(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        gradients = [to_local(_dense_gradient(parameter)) for parameter in parameters]
        states = [self._start_adamw(parameter, fused=bool(group["fused"])) for parameter in parameters]
        numbers = _numbers(group)
        adamw(
            [to_local(parameter) for parameter in parameters],
            gradients,
            [to_local(state["exp_avg"]) for state in states],
            [to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=group["fused"],
            has_complex=any(parameter.is_complex() for parameter in parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=numbers["lr"],
            weight_decay=numbers["weight_decay"],
            eps=numbers["eps"],
            maximize=False,
        )

    def _start_adamw(self, parameter: Tensor, *, fused: bool) -> dict[str, Any]:
        """Return the state of a parameter, created as torch's AdamW does."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _expect_shapes(self, name: str, parameter: Tensor, entry: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state of a parameter. A weight has a master copy if it was saved with one."""
        shapes = {"step": (), **dict.fromkeys(_MOMENTS, tuple(parameter.shape))}
        if name in self._stacked:
            stacked = self._stacked[name]
            side = min(_matrix_shape(parameter, stacked))
            if self.defaults["rotate"]:
                shapes["basis"] = (*parameter.shape[:stacked], side, side)
            else:
                del shapes["step"]  # nothing counts steps
            if "master" in entry:
                shapes["master"] = tuple(parameter.shape)
        return shapes


def _make_engine(settings: Mapping[str, Any]) -> PolarAdam:
    """Create the optimizer of the matrices, which holds no parameters of its own. It checks the settings."""
    names = ("lr", "betas", "eps", "weight_decay", *(("every",) if settings["rotate"] else ()))
    options = {name: settings[name] for name in names} | {"update_rms": _UPDATE_RMS}
    return (RotatedPolarAdam if settings["rotate"] else PolarAdam)([{"params": []}], **options)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that may be any kind of number; torch's functions want their own kinds."""
    values = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    return {name: value if isinstance(value, Tensor) else float(value) for name, value in values.items()}


def _matrix_shape(tensor: Tensor, stacked: int) -> tuple[int, int]:
    shape = tensor.shape[stacked:]
    return shape[0], math.prod(shape[1:])


def _make_block(name: str, parameter: Tensor, stacked: int) -> Block:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return Block(name, (name,), (parameter.shape,), dtype, stacked=(stacked,))


def _dense_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise TypeError("egop.EGOP does not take sparse gradients. Use sparse=False in the embedding.")
    return gradient


def _join(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"

"""EGOP: the recommended optimizer, as one class that takes the place of AdamW.

The matrices are stepped by ``egop.optim``, everything else by torch's AdamW. Its algorithm is in ``reference.py``.
"""

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

from egop.basis import (
    Basis,
    Block,
    Identity,
    ModuleIndex,
    Plan,
    Role,
    Shared,
    find_roles,
    has_norm_layers,
    match,
    rows_and_columns,
)
from egop.distributed import is_sharded, to_local, to_local_parts
from egop.formatting import pluralize
from egop.numerics import outside_inference_mode, without_autocast
from egop.optim import PolarAdam, RotatedPolarAdam
from egop.optimizer import check_state_dict, find_user_level, name_groups

__all__ = ["EGOP"]

_WIDEST = 8192  # a weight whose sides are both wider is left to AdamW: its polar factor would take too long
# Root mean square of the update of a square matrix before the learning rate, in networks with and without normalization
# layers. With these, AdamW's best rate was right for EGOP on six small networks and on a GPT.
_NORMALIZED_RMS, _PLAIN_RMS = 0.4, 0.2
_MOMENTS = ("exp_avg", "exp_avg_sq")

_Kind = tuple[int, bool, float]  # matrices stepped alike: the index of their group, whether they are stacks, their fan


class EGOP(Optimizer):
    """PolarAdam in an eigenbasis of the momentum for weight matrices, and AdamW for everything else.

    Use it in place of AdamW, with the same learning rate and weight decay. The update of a weight matrix has a root
    mean square of lr · √(outputs / inputs) · 0.4 if the model has normalization layers, and of half that otherwise.
    With this rule the learning rate that is best for AdamW works for EGOP too.

    Weights of linear layers, convolutions, attention and experts are stepped by :class:`egop.optim.PolarAdam` in
    coordinates in which their momentum has uncorrelated rows: the smaller side of each weight is rotated, and the
    rotation is renewed every ``every`` steps. AdamW steps embeddings, output heads, norms and biases.
    ``print(optimizer.plan)`` shows which weights are rotated, and why others are not.

    Weights in half precision have float32 copies, which are stepped in their place. With FSDP2, the moments are sharded
    like the weights.

    Args:
        params: a module; or ``model.named_parameters()`` or parameter groups, together with ``model``.
        lr: learning rate, the same as AdamW's.
        betas: decay of the running means of gradients and of their squares, for all parameters.
        eps: added to the root of the mean square.
        weight_decay: decoupled weight decay for all parameters. To exclude norms and biases, put them in a group of
            their own.
        rotate: set to False to run the same base optimizer on the same weights without a rotation.
        every: number of steps between renewals of a rotation.
        exclude: name patterns, such as ``"*.gate.weight"``, of weights to leave to AdamW.
        update_rms: the factor 0.4 or 0.2 of the rule above. Set it to 0.4 if the model normalizes activations by
            functions instead of modules.
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
        update_rms: float | None = None,
        model: nn.Module | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        module = params if model is None and isinstance(params, nn.Module) else model
        if update_rms is None:
            update_rms = _NORMALIZED_RMS if module is None or has_norm_layers(module) else _PLAIN_RMS
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "update_rms": update_rms}
        self.defaults = settings | {"rotate": rotate, "every": every, "foreach": foreach, "fused": fused}
        self._reset_engine()  # checks the settings
        groups = name_groups(params, model=model)
        self._index = None if module is None else ModuleIndex(module)
        self._exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._stacked: dict[str, int] = {}  # the matrices by name, with the number of dimensions that count them
        self._fans: dict[str, float] = {}  # of each matrix the root of its outputs over its inputs
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
            is_first = not self.state
            matrices: dict[_Kind, list[Tensor]] = {}
            for index, group in enumerate(self.param_groups):
                others = []
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    if self._bound.get(name) is not parameter:
                        self._bind(name, parameter)
                    if parameter.grad is None or not parameter.numel():
                        continue
                    if name in self._stacked:
                        kind = index, self._stacked[name] > 0, self._fans[name]
                        matrices.setdefault(kind, []).append(parameter)
                    else:
                        others.append(parameter)
                self._step_adamw(group, others)
            self._step_matrices(matrices)
            if is_first and all(float(group["lr"]) == 0 for group in self.param_groups):
                self._forget_empty_step()
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
        choice = {name: getattr(self, name) for name in ("_stacked", "_fans", "_left", "_exclude")}
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
        self._bound: dict[str, Tensor] = {}  # the parameters as of the last step
        self._settings: dict[_Kind, dict[str, Any]] = {}  # the engine's

    def _bind(self, name: str, parameter: Tensor) -> None:
        """Move the state of a parameter to the one that has taken its place in the groups."""
        before = self._bound.get(name)
        if before is not None and before in self.state and parameter not in self.state:
            if before.shape != parameter.shape:
                raise ValueError(
                    f"Parameter '{name}' of shape {tuple(before.shape)} was replaced by one of shape "
                    f"{tuple(parameter.shape)}, which its state does not fit. Create a new optimizer."
                )
            self.state[parameter] = self.state.pop(before)
        self._bound[name] = parameter

    def _forget_empty_step(self) -> None:
        """Reset the counters after a first step without a learning rate and gradients.

        torch's checkpoint functions take such a step to create the state that they are about to read or load.
        """
        states = list(self.state.values())
        if not any(bool(to_local(state["exp_avg"]).any()) for state in states):
            for state in states:
                if "step" in state:
                    state["step"].zero_()

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
            rows, columns = rows_and_columns(parameter.shape[role.stacked :], role.transposed)
            self._stacked[name], self._fans[name] = role.stacked, math.sqrt(rows / columns)

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

    def _step_matrices(self, matrices: Mapping[_Kind, list[Tensor]]) -> None:
        """Step the weight matrices, by kind."""
        parts, copies = [], []
        self._engine.state.clear()
        for kind, parameters in matrices.items():
            index, last, fan = kind
            group, settings = self.param_groups[index], self._settings.setdefault(kind, {})
            own = {"betas": group["betas"], "every": group["every"], "update_rms": fan * group["update_rms"]}
            settings.update(self._engine.defaults | own | _numbers(group) | {"matrices_last": last})
            weights, gradients = [], []
            for parameter, gradient in zip(parameters, _dense_gradients(parameters), strict=True):
                weight = parameter
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    weight, gradient = self._find_master(parameter), gradient.float()
                    copies.append((parameter, weight))
                # The engine steps the copy of a weight in half precision, with the state of the weight itself.
                self._engine.state[weight] = self.state[parameter]
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
        """Return the float32 copy of a weight in half precision."""
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
        fused = group["fused"]
        states = [self.state[parameter] or self._start_adamw(parameter, fused=fused) for parameter in parameters]
        numbers = _numbers(group)
        adamw(
            to_local_parts(parameters),
            to_local_parts(_dense_gradients(parameters)),
            to_local_parts([state["exp_avg"] for state in states]),
            to_local_parts([state["exp_avg_sq"] for state in states]),
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            fused=fused,
            has_complex=any(parameter.is_complex() for parameter in parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=numbers["lr"],
            weight_decay=numbers["weight_decay"],
            eps=numbers["eps"],
            maximize=False,
        )

    def _start_adamw(self, parameter: Tensor, *, fused: bool | None) -> dict[str, Any]:
        """Create the state of a parameter as torch's AdamW does."""
        state: dict[str, Any] = self.state[parameter]
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
    names = ("lr", "betas", "eps", "weight_decay", "update_rms", *(("every",) if settings["rotate"] else ()))
    options = {name: settings[name] for name in names}
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


def _dense_gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise TypeError("egop.EGOP does not take sparse gradients. Use sparse=False in the embedding.")
    return gradients


def _join(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"

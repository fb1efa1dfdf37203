"""EGOP: PolarAdam in a rotated basis for weight matrices, and AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from egop.basis import Basis, ModuleIndex, Plan, Shared, strip_compile_prefix
from egop.distributed import to_full, to_local
from egop.formatting import pluralize
from egop.numerics import check_nonnegative, check_positive_int, outside_inference_mode, without_autocast
from egop.optim import PolarAdam, RotatedPolarAdam, measure_rotation
from egop.optimizer import BoundParameters, check_separate_memory, format_groups, name_groups, warn_of_replaced
from egop.recipes.adamw import MOMENTS, read_numbers, step_adamw
from egop.recipes.changes import Change, find_changes
from egop.recipes.choice import Matrix, WeightChoice
from egop.recipes.sizes import check_update_rms, choose_update_rms, describe_sizes, make_size_settings, measure_rms
from egop.recipes.state_dicts import check_state_dict

__all__ = ["EGOP"]

_HALF = {torch.float16, torch.bfloat16}
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")  # options of AdamW that EGOP does not have

_Kind = tuple[int, Matrix]  # matrices that are stepped alike, by the index of their group


class EGOP(Optimizer):
    """PolarAdam in an eigenbasis of the momentum for weight matrices, and AdamW for everything else.

    Use it in place of AdamW, with the same weight decay. The update of a weight matrix has a root mean square of
    lr · s · max(1, √(outputs / inputs)), so that AdamW's best learning rate is a good starting point. In models without
    normalization layers, s is 1.6 times the root mean square of Adam's direction. In others, s is 0.4. Where s is a
    number, 3 takes the place of 1 for convolutions whose windows overlap, and updates shrink where gradients have
    vanished.

    Weights of linear layers, convolutions, attention and experts are updated by :class:`egop.optim.PolarAdam` in
    coordinates that follow their momentum: the smaller side of each weight is rotated to its principal axes. The
    rotation is renewed often at first, and then every ``every`` steps. AdamW updates embeddings, output heads, norms
    and biases. ``print(optimizer.plan)`` shows which weights are rotated, and why others are not.

    Weights in half precision have float32 copies, which are stepped in their place. With FSDP2, the moments are sharded
    like the weights.

    Args:
        params: a module; or ``model.named_parameters()`` or parameter groups, together with ``model``.
        lr: learning rate. Start with AdamW's, but at most 0.008, then try half and twice that, and go on while the loss
            falls.
        betas: decay rates of the running means of gradients and of their squares, for all parameters.
        eps: added to the denominator.
        weight_decay: decoupled weight decay for all parameters. To exclude norms and biases, put them in a group of
            their own.
        rotate: set to False to run the same base optimizer on the same weights without a rotation.
        every: largest number of steps between renewals of a rotation. Early ones are more frequent: after steps 1, 2,
            3, 4, 6, 8, 12, 16, 24, ...
        exclude: name patterns, such as ``"*.gate"``, of modules or weights to leave to AdamW.
        update_rms: the factor s of the rule above: a number, or ``"adam"`` for 1.6 times the root mean square of Adam's
            direction, as in models without normalization layers. Set it to 0.4 if the model normalizes activations by
            functions instead of modules.
        outside_lr: learning rate of what AdamW updates (embeddings, heads, norms, biases), as a multiple of ``lr``. Try
            4 for vision transformers.
        model: the module that owns the parameters, if ``params`` is not a module; it determines their roles.
        foreach: passed to AdamW.
        fused: passed to AdamW.
        others: AdamW's ``amsgrad``, ``maximize``, ``capturable`` and ``differentiable``, which must be False.

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
    _engine: PolarAdam
    _bound: BoundParameters  # the parameters that the state belongs to

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rotate: bool = True,
        every: int = 200,
        exclude: Sequence[str] | None = (),
        update_rms: float | str | None = None,
        outside_lr: float = 1.0,
        model: nn.Module | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        **others: bool,
    ) -> None:
        if unknown := others.keys() - set(_REFUSED):
            raise TypeError(f"egop.EGOP got an unexpected keyword argument '{min(unknown)}'.")
        _refuse_options(others)
        if not isinstance(rotate, bool):
            raise TypeError(f"rotate must be True or False, got {rotate!r}.")
        module = params if model is None and isinstance(params, nn.Module) else model
        if update_rms is None:
            update_rms = choose_update_rms(module)
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "update_rms": update_rms}
        settings |= {"rotate": rotate, "every": every, "outside_lr": outside_lr}
        self.defaults = settings | {"foreach": foreach, "fused": fused}
        self._is_built = False
        self._reset_engine()  # checks the settings
        groups = name_groups(params, model=model)
        self._index = None if module is None else ModuleIndex(module)
        self._choice = WeightChoice(exclude)
        super().__init__(groups, self.defaults)
        self._is_built = True
        self._bound = BoundParameters(self.param_groups)
        self._choice.check(self._bound.names, self._index)
        self._check_memory(dict(zip(self._bound.names, self._bound.tensors, strict=True)))

    @property
    def plan(self) -> Plan:
        """The weights that are rotated, and why others are not."""
        return self._choice.plan(self._named_parameters(), rotate=self.defaults["rotate"])

    @property
    @outside_inference_mode
    def basis(self) -> Basis:
        """A copy of the current basis of each weight that has been stepped; empty without a rotation."""
        structure, matrices = Shared(side="smaller"), self._choice.matrices
        changes = [
            structure.change(matrices[name].block(name, weight), {"basis": self.state[weight]["basis"].clone()})
            for name, weight in self._named_parameters()
            if "basis" in self.state.get(weight, {})
        ]
        return Basis(changes, unrotated=self._choice.left)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return numbers to log, for instance to TensorBoard: means, maxima or counts over all weight matrices.

        - ``relative_update``: norm of an update, unless gradients have vanished, over the norm of the weight. With
          ``update_rms="adam"`` the norm is estimated from the running means.
        - ``stable_rank``: of the momentum, relative to the smaller side of the weight; 1 if all directions are equally
          strong.
        - ``off_diagonal``: share of the momentum's Gram matrix off its diagonal in the basis; 0 in the eigenbasis.
          The momentum changes between renewals, so values above 0.5 are normal.
        - ``orthogonality_error``: largest entry of ``|QᵀQ − I|`` of a basis Q.
        - ``failed_renewals``: number of weights whose basis cannot be renewed, because the momentum is not finite or
          its squares overflow. The basis stays as it is.
        - ``nonfinite``: number of weights whose momentum is not finite.

        This synchronizes the GPU, so do not call it in every step.
        """
        self._follow_changes()
        found: dict[str, list[float]] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                matrix, state = self._choice.matrices.get(name), self.state.get(parameter, {})
                if matrix is None or "exp_avg" not in state:
                    continue
                size = float(group["lr"]) * measure_rms(group, matrix, state) * math.sqrt(parameter.numel())
                norm = float(to_full(parameter).double().norm())
                found.setdefault("relative_update", []).append(size / norm if norm else math.inf)
                momentum = to_full(state["exp_avg"])
                matrices = momentum if matrix.stacked else momentum.flatten(1)
                for key, value in measure_rotation(matrices, state.get("basis")).items():
                    found.setdefault(key, []).append(value)
        totals: dict[str, Callable[[list[float]], float]] = {"orthogonality_error": max}
        totals |= dict.fromkeys(("failed_renewals", "nonfinite"), sum)
        return {key: float(totals.get(key, fmean)(values)) for key, values in found.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of named parameters. If the optimizer was given the model, the parameters need no names."""
        if self._is_built:
            taken = [name for name, _ in self._named_parameters()]  # and forgets removed ones
            (param_group,) = name_groups([param_group], taken, self._index)
        # So that a state dict fits with and without torch.compile.
        param_group["param_names"] = list(map(strip_compile_prefix, param_group["param_names"]))
        _refuse_options(param_group)
        if param_group.get("rotate", self.defaults["rotate"]) != self.defaults["rotate"]:
            raise ValueError("rotate applies to all weights. To leave those of a group to AdamW, name them in exclude.")
        if "exclude" in param_group:
            raise ValueError("exclude applies to all weights: pass it to egop.EGOP, not in a parameter group.")
        settings = self.defaults | param_group
        if settings["foreach"] and settings["fused"]:
            raise ValueError("foreach=True and fused=True exclude each other. Use one of them.")
        if settings["foreach"] and isinstance(settings["lr"], Tensor):
            raise ValueError("foreach=True does not support a tensor as lr. Use a number, or foreach=None.")
        _make_engine(settings)  # checks them
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._choice.add(dict(zip(group["param_names"], group["params"], strict=True)), self._index)
        if self._is_built:
            self._choice.check(taken, self._index, group["param_names"])

    @outside_inference_mode
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Call optimizer.step() outside the CUDA graph: its learning rate and rotations would never change."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_autocast():
            self._follow_changes()
            is_first, known = not self.state, self._choice.matrices
            matrices: dict[_Kind, tuple[list[Tensor], list[Tensor]]] = {}
            others: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.param_groups]
            for index, group in enumerate(self.param_groups):
                self._check_group(group)
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    gradient = parameter.grad
                    if gradient is None or not parameter.numel():
                        continue
                    if gradient.layout is not torch.strided:
                        raise TypeError("egop.EGOP does not support sparse gradients: use sparse=False in embeddings.")
                    matrix = known.get(name)
                    own = others[index] if matrix is None else matrices.setdefault((index, matrix), ([], []))
                    own[0].append(parameter)
                    own[1].append(gradient)
            for group, outside in zip(self.param_groups, others, strict=True):
                step_adamw(group, *outside, self.state)
            self._step_matrices(matrices)
            warn_of_replaced(self._bound, self._index)
            if is_first and all(float(group["lr"]) == 0 for group in self.param_groups):
                self._forget_empty_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume exactly."""
        self._follow_changes()
        return super().state_dict()

    @outside_inference_mode
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of an optimizer with the same parameters and the same ``rotate``.

        Raises:
            ValueError: if it does not fit. Nothing is changed then.
        """
        self._follow_changes()
        loaded: dict[str, Any] = {}
        options = [option for option in self.defaults if option not in _REFUSED]  # torch adds some of these

        def check(_: Optimizer, given: Any) -> None:
            check_state_dict(given, self.param_groups, options, _make_engine, self._expect_shapes)
            loaded.update(given)

        # Between the user's hooks: those before may replace the state dict, those after may change the state.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._copy_state(loaded), prepend=True),
        ]
        try:
            super().load_state_dict(dict(state_dict) if isinstance(state_dict, Mapping) else {})
        finally:
            for handle in handles:
                handle.remove()

    def _copy_state(self, loaded: Mapping[str, Any]) -> None:
        """Copy the state of a state dict without casting it.

        torch casts the state to the parameter's dtype, and keeps the given tensors where nothing is cast. But weights
        in half precision have float32 state, and several optimizers may load one state dict.
        """
        saved = [key for group in loaded["param_groups"] for key in group["params"]]
        for key, (name, parameter) in zip(saved, self._named_parameters(), strict=True):
            if key not in loaded["state"]:
                continue
            if name in self._choice.matrices:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                self.state[parameter] = {
                    entry: value.detach().to("cpu" if entry == "step" else parameter.device, dtype, copy=True)
                    for entry, value in loaded["state"][key].items()
                    if entry != "master" or parameter.dtype in _HALF
                }
            else:
                self.state[parameter] = {entry: value.clone() for entry, value in self.state[parameter].items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; the model is left out."""
        self._follow_changes()
        return super().__getstate__() | {"_choice": self._choice}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a loaded state."""
        super().__setstate__({"_index": None, "_is_built": True} | state if "_choice" in state else state)
        self._reset_engine()

    def __repr__(self) -> str:
        pairs = [pair for group in self.param_groups for pair in zip(group["param_names"], group["params"])]  # noqa: B905
        trained = [name for name, parameter in pairs if parameter.requires_grad]
        count = sum(name in self._choice.matrices for name in trained)
        rotated = self.defaults["rotate"]
        matrices = pluralize(count, "rotated weight") if rotated else f"{pluralize(count, 'weight')} without rotation"
        others = pluralize(len(trained) - count, "other parameter")
        rates = " and ".join(dict.fromkeys(f"{float(group['lr']):g}" for group in self.param_groups))
        return f"{type(self).__name__}({matrices}, AdamW for {others}, lr={rates})"

    def __str__(self) -> str:
        sizes = describe_sizes([group["update_rms"] for group in self.param_groups])
        return "\n".join([repr(self), sizes, *format_groups(self.param_groups), str(self.plan)])

    def _named_parameters(self) -> list[tuple[str, Tensor]]:
        self._follow_changes()
        return [pair for group in self.param_groups for pair in zip(group["param_names"], group["params"], strict=True)]

    def _reset_engine(self) -> None:
        if "_engine" in vars(self):
            self._engine.reset_graphs()  # waits for the GPU
        self._engine = _make_engine(self.defaults)
        self._bound = BoundParameters(self.param_groups if self._is_built else ())
        self._settings: dict[_Kind, dict[str, Any]] = {}  # the engine's

    def _follow_changes(self) -> None:
        """Let names and state follow parameters that were replaced, cast or moved, also to another place or group."""
        if self._bound.matches(self.param_groups):
            return
        groups = find_changes(self.param_groups, self._bound, self._index)
        changes = [change for own in groups for change in own]
        # First all that may be refused, so that nothing has changed then.
        for change in changes:
            self._check_change(change)
        self._check_memory({change.name: change.parameter for change in changes})
        for change in changes:
            self._apply_change(change)
        for group, own in zip(self.param_groups, groups, strict=True):
            group["param_names"] = [change.name for change in own]
        self._bound = BoundParameters(self.param_groups)
        self._engine.reset_graphs()  # its stacks hold parameters and state that may have been replaced

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError for settings that cannot be changed in a group, or not to this value."""
        _refuse_options(group)
        if group["rotate"] != self.defaults["rotate"]:
            raise ValueError("rotate cannot be changed in param_groups: create a new optimizer.")
        if group["rotate"]:
            check_positive_int("every", group["every"])

    def _find_owner(self, change: Change) -> Tensor:
        """Return the parameter whose state the new one takes over: its own, if it has any."""
        before, parameter = change.before, change.parameter
        return before if before is not None and before in self.state and parameter not in self.state else parameter

    def _check_change(self, change: Change) -> None:
        """Raise ValueError if a parameter has a shape that its state or, without state, its role does not fit."""
        state = self.state.get(self._find_owner(change), {})
        now = change.parameter.shape
        shape = now if change.kind is None else change.kind[-1]
        if "exp_avg" in state:
            shape = state["exp_avg"].shape
        if len(shape) != len(now) or (state and shape != now):
            raise ValueError(
                f"Parameter '{change.name}' of shape {tuple(shape)} was replaced by one of shape {tuple(now)}, which "
                "its state does not fit. Create a new optimizer."
            )

    def _apply_change(self, change: Change) -> None:
        """Move the state of a parameter to the one that has taken its place, and follow casts and moves."""
        name, parameter = change.name, change.parameter
        if change.kind is None or change.kind[-1] != parameter.shape:
            self._choice.add({name: parameter}, self._index)
        if (owner := self._find_owner(change)) is not parameter:
            self.state[parameter] = self.state.pop(owner)
        if parameter in self.state:
            self._cast_state(parameter, is_matrix=name in self._choice.matrices)

    def _check_memory(self, named: Mapping[str, Tensor]) -> None:
        check_separate_memory({name: parameter for name, parameter in named.items() if name in self._choice.matrices})

    def _cast_state(self, parameter: Tensor, *, is_matrix: bool) -> None:
        """Bring the state of a parameter to its dtype and device; the state of matrices is at least float32."""
        state = self.state[parameter]
        dtype = torch.promote_types(parameter.dtype, torch.float32) if is_matrix else parameter.dtype
        if parameter.dtype not in _HALF:
            state.pop("master", None)
        for entry, value in state.items():
            if entry != "step" and (value.dtype, value.device) != (dtype, parameter.device):
                state[entry] = value.to(parameter.device, dtype)

    def _forget_empty_step(self) -> None:
        """Reset the counters after a first step without a learning rate and gradients.

        torch's checkpoint functions take such a step to create the state that they are about to read or load.
        """
        states = list(self.state.values())
        # Of whole moments, so that all processes agree.
        if not any(bool(to_full(state["exp_avg"]).any()) for state in states):
            for state in states:
                if "step" in state:
                    state["step"].zero_()

    def _step_matrices(self, matrices: Mapping[_Kind, tuple[list[Tensor], list[Tensor]]]) -> None:
        """Step the weight matrices, by kind."""
        parts, copies = [], []
        for (index, matrix), (parameters, gradients) in matrices.items():
            group, settings = self.param_groups[index], self._settings.setdefault((index, matrix), {})
            if not settings:
                settings |= self._engine.defaults | {"matrices_last": matrix.stacked > 0}
            settings["lr"], settings["eps"], settings["weight_decay"] = read_numbers(group)
            settings["betas"], settings["every"] = group["betas"], group["every"]
            settings |= make_size_settings(group["update_rms"], matrix)
            # A weight in half precision is stepped through its float32 copy, with the state of the weight itself.
            states, weights = [self.state[parameter] for parameter in parameters], parameters
            if not _HALF.isdisjoint([parameter.dtype for parameter in parameters]):
                weights = list(map(_find_master, parameters, states))
                gradients = [gradient.to(weight.dtype) for weight, gradient in zip(weights, gradients, strict=True)]
                copies += [pair for pair in zip(parameters, weights, strict=True) if pair[0] is not pair[1]]
            parts.append((settings, weights, gradients, states))
        self._engine.step_parts(parts)
        for parameter, weight in copies:
            to_local(parameter).copy_(to_local(weight))

    def _expect_shapes(self, name: str, parameter: Tensor, entry: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the state of a parameter. A weight has a master copy if it was saved with one."""
        shapes = {"step": (), **dict.fromkeys(MOMENTS, tuple(parameter.shape))}
        if matrix := self._choice.matrices.get(name):
            if self.defaults["rotate"]:
                shapes["basis"] = matrix.basis_shape(parameter)
            if "master" in entry:
                shapes["master"] = tuple(parameter.shape)
        return shapes


def _refuse_options(settings: Mapping[str, Any]) -> None:
    for option in _REFUSED:
        if settings.get(option):
            raise ValueError(f"egop.EGOP has no option {option}. Leave it out.")


def _make_engine(settings: Mapping[str, Any]) -> PolarAdam:
    """Create the optimizer of the matrices, which holds no parameters of its own. It checks the settings."""
    check_nonnegative("outside_lr", settings["outside_lr"])
    check_update_rms(settings["update_rms"])
    names = ("lr", "betas", "eps", "weight_decay", *(("every",) if settings["rotate"] else ()))
    options = {name: settings[name] for name in names}
    return (RotatedPolarAdam if settings["rotate"] else PolarAdam)([{"params": []}], **options)


def _find_master(parameter: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the float32 copy of a weight in half precision, or the weight itself if it needs none."""
    if parameter.dtype not in _HALF:
        return parameter
    if "master" not in state:
        state["master"] = parameter.detach().float()
    master: Tensor = state["master"]
    # Entries that someone else has changed no longer round to the weight's.
    local, values = to_local(master), to_local(parameter)
    local.copy_(torch.where(local.to(values.dtype) == values, local, values.float()))
    return master

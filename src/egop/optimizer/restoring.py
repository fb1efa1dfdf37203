"""The way back from states to an optimizer: the working parts that they stand for, built before anything is changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from egop.basis import Basis, ChangeOfBasis, orthonormality_error, plain_name, rebuild
from egop.distributed import LocalShards, take_shard, to_full
from egop.optimizer.binding import UNKNOWN, BoundBlock, map_to_blocks
from egop.optimizer.engine import Engine
from egop.optimizer.refreshing import Refresher
from egop.optimizer.states import (
    ABOUT,
    BASIS,
    CLOCK,
    COORDINATES,
    OWN,
    REFRESH,
    REST,
    STANDS_FOR,
    STATE_VERSION,
    exported,
    key_at,
    mapped,
)
from egop.optimizer.validation import StateCheck, check_settings

_DAMAGED = "The state dict is incomplete or damaged"
_ABOUT_KEYS = {"version", "optimizer", "name", "shape", "dtype", "refresh"}


@dataclass
class Restored:
    """The working parts that a state stands for, ready to take the place of others."""

    blocks: list[BoundBlock]
    pieces: LocalShards
    inner: Optimizer
    refresher: Refresher | None  # a copy of the optimizer's own, with what it is to remember
    with_refresh: bool  # whether the state was saved with one


@dataclass
class _Parsed:
    """What the state of one parameter says."""

    entry: Mapping[str, Any]
    about: dict[str, Any]
    counts: list[int] = field(default_factory=list)
    stepped: bool = False

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> _Parsed:
        about = about_of(entry)
        name = about["name"]
        for key, value in entry.items():
            if str(key).startswith(OWN) and not (isinstance(value, Tensor) and value.layout == torch.strided):
                raise ValueError(f"{_DAMAGED}: '{key}' of '{name}' is {value!r:.80}. Must be a dense tensor.")
        clock = to_full(entry[CLOCK]) if CLOCK in entry else torch.empty(0, device="cpu")
        if clock.shape != (4,) or clock.is_floating_point() or clock.is_complex():
            raise ValueError(f"{_DAMAGED}: '{CLOCK}' of '{name}' does not hold four counts.")
        *counts, stepped = clock.tolist()
        return cls(entry, about, counts, bool(stepped))

    def some(self, kind: str) -> dict[str, Any]:
        """What is there of one kind, by the rest of its name."""
        return {key.removeprefix(kind): value for key, value in self.entry.items() if str(key).startswith(kind)}

    def inner(self, place: int) -> dict[Any, Any] | None:
        """The inner optimizer's state of one of the coordinates; None before its first step."""
        if not self.stepped:
            return None
        keys = {key: key_at(place, key) for key in self.entry if not str(key).startswith(OWN)}
        return {inner_key: self.entry[key] for key, inner_key in keys.items() if inner_key is not None}


def about_of(entry: Mapping[str, Any], name: str = "a parameter") -> dict[str, Any]:
    """What the state of a parameter says that it is of; errors call it by ``name``."""
    try:
        about: dict[str, Any] = json.loads(to_full(entry[ABOUT]).cpu().numpy().tobytes())
        whole_place = type(about.get("place", 0)) is int
    except Exception as error:
        raise ValueError(
            f"{_DAMAGED}: the '{ABOUT}' of {name} cannot be read ({type(error).__name__}: {error})."
        ) from error
    if about.get("version") == STATE_VERSION and not (whole_place and about.keys() >= _ABOUT_KEYS):
        raise ValueError(f"{_DAMAGED}: the '{ABOUT}' of {name} is not complete.")
    return about


def parsed(engine: Engine, state_dict: dict[str, Any]) -> tuple[Restored, list[dict[str, Any]]]:
    """The working parts that a state dict stands for, and the parameter groups as it has them; nothing is changed."""
    try:
        entries = entries_of(state_dict, engine)
        groups = [
            group | {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            for group, saved in zip(engine.param_groups, state_dict["param_groups"], strict=True)
        ]
        parts = restored(engine, entries, others_of(state_dict), groups)
        # Torch copies the groups and puts the parameters back.
        groups = [group | {"params": list(range(len(group["params"])))} for group in groups]
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"{_DAMAGED} ({type(error).__name__}: {error}). Load one as optimizer.state_dict() gave it."
        ) from error
    return parts, groups


@torch.no_grad()
def rebound(engine: Engine) -> Restored:
    """The working parts for the parameters that the groups have now: those before, or others in their places."""
    groups = engine.param_groups
    kept = [group.get("param_names") for group in groups]
    try:
        states = exported(engine, complete=True)
        bound = zip(engine.bound.names, engine.bound.members, strict=True)
        entries = {name: states.pop(member) for name, member in bound}
        names = iter(engine.bound.names_in(groups))
        for group in groups:
            group["param_names"] = [next(names) for _ in group["params"]]
        ordered = [entries[name] for group in groups for name in group["param_names"]]
        check_about([about_of(entry) for entry in ordered], groups, engine.base.name)
        parts = restored(engine, ordered, states)
        if engine.refresher is not None:
            engine.refresher.check(engine)
    except BaseException as error:
        for group, names_before in zip(groups, kept, strict=True):
            group.update({} if names_before is None else {"param_names": names_before})
        if not isinstance(error, (TypeError, ValueError)):
            raise
        raise ValueError(
            "The parameters in param_groups are not those that the optimizer was made with, and it cannot go on "
            f"with these. {error}"
        ) from error
    return parts


def entries_of(state_dict: Any, engine: Engine) -> list[Mapping[str, Any]]:
    """The state of each parameter in a state dict, in the order of the optimizer's, checked to be of its kind.

    Torch's tools leave out parameters that are frozen: of these the optimizer keeps what it has.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"A state dict must be a dict as optimizer.state_dict() gives it, got {state_dict!r:.80}.")
    if "egop" in state_dict:
        version = state_dict["egop"].get("version", 1)
        raise ValueError(f"The state dict has version {version}; this egop reads {STATE_VERSION}.")
    state = state_dict.get("state", {})
    if "param_groups" in state_dict and not any(isinstance(item, Mapping) and ABOUT in item for item in state.values()):
        raise ValueError(
            "This is not a state dict of egop.ReparameterizedOptimizer, but of a plain optimizer. Moments of another "
            "coordinate system cannot be loaded: load the model's weights alone, and start with a new optimizer."
        )
    saved = [[state_dict["state"].get(key) for key in group["params"]] for group in state_dict["param_groups"]]
    _check_groups(saved, engine.param_groups)
    current = None
    entries = []
    for group, members in zip(engine.param_groups, saved, strict=True):
        for parameter, entry in zip(group["params"], members, strict=True):
            if entry is None:
                current = current or exported(engine, complete=True)
                entry = current[parameter]
            entries.append(entry)
    names = [f"'{plain_name(name)}'" for group in engine.param_groups for name in group["param_names"]]
    check_about(list(map(about_of, entries, names)), engine.param_groups, engine.base.name)
    return entries


def others_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What a state dict has that is of no parameter: some optimizers keep more than that in their states."""
    members = {key for group in state_dict["param_groups"] for key in group["params"]}
    others = {key: value for key, value in state_dict["state"].items() if key not in members}
    if wrong := [key for key in others if not isinstance(key, str)]:
        raise ValueError(f"{_DAMAGED}: it has state of {wrong}, which are no parameters.")
    return others


def _check_groups(saved: list[list[Any]], groups: list[dict[str, Any]]) -> None:
    if len(saved) != len(groups):
        raise ValueError(f"The state dict has {len(saved)} parameter group(s), the optimizer {len(groups)}.")
    for index, (members, group) in enumerate(zip(saved, groups, strict=True)):
        if len(members) != len(group["params"]):
            there = sorted(about_of(entry)["name"] for entry in members if entry is not None)
            here = sorted(map(plain_name, group["param_names"]))
            raise ValueError(
                f"The state dict is of another model: its group {index} has {len(members)} parameter(s), {there}, and "
                f"the optimizer's {len(here)}, {here}."
            )
        for name, parameter, entry in zip(group["param_names"], group["params"], members, strict=True):
            if entry is None and parameter.requires_grad:
                raise ValueError(f"{_DAMAGED}: it has no state of '{plain_name(name)}'.")


def check_about(abouts: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], inner_name: str) -> None:
    """Raise an error that says so when states are not of this kind of optimizer over these parameters."""
    for about in abouts:
        if about["version"] != STATE_VERSION:
            raise ValueError(f"The state dict has version {about['version']}; this egop reads {STATE_VERSION}.")
        if about["optimizer"] != inner_name:
            raise ValueError(f"The state dict is of {about['optimizer']}, this optimizer runs {inner_name}.")
    members = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    here = {plain_name(name): list(parameter.shape) for name, parameter in members}
    there = {about["name"]: list(about["shape"]) for about in abouts}
    if here.keys() != there.keys():
        raise ValueError(
            f"The state dict is of another model: only it has {sorted(there.keys() - here.keys())}, "
            f"only the optimizer has {sorted(here.keys() - there.keys())}."
        )
    for name, shape in here.items():
        if shape != there[name]:
            raise ValueError(
                f"Block '{name}' has shape {tuple(there[name])} in the state dict, but {tuple(shape)} here."
            )
    if list(here) != list(there):  # state goes by position
        raise ValueError(
            f"The state dict has the parameters in another order: {list(there)}, but here {list(here)}. "
            "Give them to the optimizer in the order in which they were saved."
        )


def restored(
    engine: Engine,
    entries: Sequence[Mapping[str, Any]],
    others: Mapping[Any, Any],
    groups: Sequence[dict[str, Any]] | None = None,
) -> Restored:
    """The working parts that states stand for, over the parameters that the groups have now; nothing is changed.

    Args:
        engine: of the optimizer.
        entries: the state of each parameter.
        others: what an inner optimizer keeps in its state that is of no parameter.
        groups: the parameter groups with the hyper-parameters of a state dict, which is then checked.
    """
    parsed = [_Parsed.of(entry) for entry in entries]
    with_block = sorted((told for told in parsed if "block" in told.about), key=lambda told: int(told.about["place"]))
    changes = [_rebuild_change(told) for told in with_block]
    for change in changes:
        for key, tensor in change.tensors.items():
            if not orthonormality_error(tensor) < 1e-3:
                where = f"the {key} of block '{change.block.name}'"
                raise ValueError(f"{_DAMAGED}: {where} is not orthonormal.")
    try:
        blocks = engine.bind(Basis(changes), engine.param_groups)
    except ValueError as error:
        raise ValueError(str(error) if groups is None else f"{_DAMAGED}: {error}") from error
    for bound, told in zip(blocks, with_block, strict=True):
        _restore_block(bound, told)
    pieces = LocalShards()
    inner = engine.inner_over(blocks, pieces, groups)
    if groups is not None:
        check_settings(engine.base, groups, engine.param_groups, inner)
    members = [parameter for group in engine.param_groups for parameter in group["params"]]
    inside = map_to_blocks(blocks)
    states: dict[Tensor, dict[Any, Any] | None] = {}
    labels: dict[Tensor, str] = {}
    for parameter, told in zip(members, parsed, strict=True):
        if (block := inside.get(id(parameter))) is None:
            piece = pieces.get(parameter)
            states[piece] = _placed(told.inner(0), parameter, cut=True)
            labels[piece] = f"parameter '{told.about['name']}'"
        elif block.originals[0] is parameter:
            originals = block.originals if block.by_rows else [parameter] * len(block.coordinates)
            for place, (coordinate, original) in enumerate(zip(block.coordinates, originals, strict=True)):
                states[coordinate] = _placed(told.inner(place), original, cut=block.by_rows)
                labels[coordinate] = f"block '{block.name}'"
    cast = any(str(parameter.dtype) != told.about["dtype"] for parameter, told in zip(members, parsed, strict=True))
    if groups is not None:
        check = StateCheck(engine.base, inner, cast=cast)
        for tensor, state in states.items():
            states[tensor] = check.adapt(state, tensor, labels[tensor])
    _load_inner_state(inner, states, cast=cast)
    inner.state.update(copy.deepcopy(dict(others)))
    memories = {block.name: told.some(REFRESH) for block, told in zip(blocks, with_block, strict=True)}
    with_refresh = any(told.about["refresh"] for told in parsed)
    refresher = copy.copy(engine.refresher)
    if refresher is not None and with_refresh:
        refresher.load(parsed[0].counts, memories, blocks)
    elif refresher is not None:
        refresher.reset()
    return Restored(blocks, pieces, inner, refresher, with_refresh)


def _rebuild_change(parsed: _Parsed) -> ChangeOfBasis:
    tensors = {key: to_full(tensor).clone() for key, tensor in parsed.some(BASIS).items()}
    try:
        return rebuild(parsed.about["block"], tensors)
    except Exception as error:
        where = f"the basis of '{parsed.about['name']}'"
        raise ValueError(f"{_DAMAGED}: {where} cannot be built ({type(error).__name__}: {error}).") from error


def _restore_block(block: BoundBlock, parsed: _Parsed) -> None:
    digests = None
    if STANDS_FOR in parsed.entry and not block.by_rows:
        rows = to_full(parsed.entry[STANDS_FOR])
        if rows.shape != (len(block.originals), len(UNKNOWN) // 2) or rows.dtype != torch.uint8:
            raise ValueError(f"{_DAMAGED}: '{STANDS_FOR}' of block '{block.name}' does not hold digests.")
        digests = [bytes(row).hex() for row in rows.tolist()]
    rest = _in_order(parsed, REST, len(block.rest or ()), block.name)
    coordinates = _in_order(parsed, COORDINATES, len(block.coordinates), block.name)
    block.restore(coordinates, [to_full(tensor) for tensor in rest] or None, digests)


def _in_order(parsed: _Parsed, kind: str, count: int, block: str) -> list[Any]:
    """The tensors of one kind that a block has several of."""
    tensors = parsed.some(kind)
    if missing := [f"{kind}{place}" for place in range(count) if str(place) not in tensors]:
        raise ValueError(f"{_DAMAGED}: it has no '{missing[0]}' of block '{block}'.")
    return [tensors[str(place)] for place in range(count)]


def _placed(state: Mapping[Any, Any] | None, original: Tensor, *, cut: bool) -> dict[Any, Any] | None:
    """Copies of a state's tensors, as this process has them: of a parameter that is cut by rows, its rows."""
    if state is None:
        return None

    def placed(value: Tensor) -> Tensor:
        if value.dim() == 0:
            return to_full(value).clone()
        return (take_shard(value, original) if cut else to_full(value)).to(original.device, copy=True)

    return {key: mapped(value, placed) for key, value in state.items()}


def _load_inner_state(inner: Optimizer, states: Mapping[Tensor, Mapping[Any, Any] | None], *, cast: bool) -> None:
    """Give an inner optimizer its state; of parameters that were cast since, torch casts it too."""
    tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
    here = {index: dict(state) for index, tensor in enumerate(tensors) if (state := states.get(tensor))}
    if not here:
        return
    fresh = dict(inner.state)  # some optimizers make states when they are made themselves
    inner.load_state_dict({"state": here, "param_groups": inner.state_dict()["param_groups"]})
    inner.state.update({tensor: state for tensor, state in fresh.items() if tensor not in inner.state})
    for index, saved in here.items():
        state, tensor = inner.state[tensors[index]], tensors[index]
        for key, value in saved.items():
            if not isinstance(value, Tensor):
                state[key] = value  # torch makes other containers, a deque without its length
                continue
            # Torch casts all it loads to the parameter's precision, also running products, which are in another one.
            if state[key].dtype != value.dtype and not (cast and value.shape == tensor.shape):
                state[key] = value.to(state[key].device)
            # Fused kernels take it that a state lies in memory as its parameter does.
            if state[key].shape == tensor.shape and state[key].stride() != tensor.stride():
                state[key] = torch.empty_like(tensor, dtype=state[key].dtype, requires_grad=False).copy_(state[key])

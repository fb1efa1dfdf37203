"""The state of an optimizer by parameter, where torch's tools look for it: export, edit and restore.

``state[parameter]`` has the inner optimizer's state of the parameter (or of its coordinates) under its usual names and,
with names that begin with ``egop/``, the block's coordinates and basis, the state of the refresh, and a description of
all this. The state of a block of several parameters is stored with the first one. Except for the inner optimizer's own
state, everything is a tensor, so that every tool can store it under the parameter's name.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from egop.basis import Basis, ChangeOfBasis, build_change, strip_compile_prefix
from egop.distributed import LocalShards, take_shard, to_full, to_local
from egop.optimizer.binding import UNKNOWN, BoundBlock, map_to_blocks
from egop.optimizer.engine import Engine
from egop.optimizer.inner import Group, InnerOptimizers
from egop.optimizer.refreshing import Refresher
from egop.optimizer.state_checks import StateCheck, check_settings

STATE_VERSION = 2

OWN = "egop/"
ABOUT, CLOCK, STANDS_FOR = f"{OWN}about", f"{OWN}clock", f"{OWN}stands_for"
BASIS, COORDINATES, REST, REFRESH = (f"{OWN}{kind}/" for kind in ("basis", "coordinates", "rest", "refresh"))

Entry = dict[str, Any]  # the state of one parameter

_DAMAGED = "The state dict is incomplete or damaged"
_ABOUT_KEYS = {"version", "optimizer", "name", "shape", "dtype", "refresh"}


# --- export ---


def export_state(engine: Engine, *, complete: bool) -> dict[Any, Entry]:
    """Return the state of every parameter; its tensors are the optimizer's own.

    A parameter that has not been stepped gets the state that it will have after a step, marked as not stepped: tools
    that load a checkpoint in place need to know what is in it.

    Args:
        engine: the engine of the optimizer.
        complete: whether to add the slow parts: copies, digests of the parameters, and sums over processes.
    """
    refresher = engine.refresher
    if refresher is not None:
        refresher.prepare(engine)
    places = {block.name: place for place, block in enumerate(engine.blocks)}
    refresh_states = {} if refresher is None else refresher.block_states(engine, complete=complete)
    counts = [0, 0, 0] if refresher is None else refresher.counts()
    groups = engine.inner.map_to_groups()
    states: dict[Any, Entry] = {}
    bound = engine.bound
    for name, parameter, (dtype, _) in zip(bound.names, bound.tensors, bound.kinds, strict=True):
        block = engine.find_block(parameter)
        about = {"version": STATE_VERSION, "optimizer": engine.base.name, "name": name}
        about |= {"shape": list(parameter.shape), "dtype": str(dtype), "refresh": refresher is not None}
        entry, stepped = {}, False
        if block is None:
            piece = engine.pieces.get(parameter)
            inner, stepped = _export_inner(engine, [piece], groups)
            entry = dict(inner[0])
            if piece is not parameter:
                entry = _map_tensors(engine.pieces.as_sharded(piece), entry)
        elif block.originals[0] is parameter:
            entry, stepped = _export_block(engine, block, groups, complete=complete)
            entry |= {f"{REFRESH}{key}": tensor for key, tensor in refresh_states.get(block.name, {}).items()}
            about |= {"place": places[block.name], "block": block.whole_change().describe()}
        entry[CLOCK] = torch.tensor([*counts, stepped], device=parameter.device)
        entry[ABOUT] = encode_about(about).to(parameter.device)
        states[parameter] = entry
    return states | {key: value for key, value in engine.inner.state.items() if not isinstance(key, Tensor)}


def _export_block(
    engine: Engine, block: BoundBlock, groups: Mapping[int, Any], *, complete: bool
) -> tuple[Entry, bool]:
    # A state dict gets copies, since it has digests of the parameters that they represent.
    def take(tensor: Tensor) -> Tensor:
        return tensor.clone() if complete else tensor

    entry: Entry = {}
    states, stepped = _export_inner(engine, block.coordinates, groups)
    for place, (coordinate, state) in enumerate(zip(block.coordinates, states, strict=True)):
        if block.by_rows:
            state = _map_tensors(partial(block.as_sharded, place), state)
        # Nearly all blocks have one coordinate tensor, which needs no number.
        entry |= {key if place == 0 else f"{place}/{key}": value for key, value in state.items()}
        entry[f"{COORDINATES}{place}"] = block.as_sharded(place, take(coordinate.detach()))
    entry |= {f"{BASIS}{key}": take(tensor) for key, tensor in block.change.tensors.items()}
    entry |= {f"{REST}{place}": take(tensor) for place, tensor in enumerate(block.rest or [])}
    # The entry is always there, because torch's tools ask for the layout of a state before they load one. Digests of
    # one process's rows would mean nothing to the others.
    digests = block.compute_digests() if complete and not block.by_rows else [UNKNOWN] * len(block.originals)
    if complete and block.by_rows:
        block.mark_saved()
    rows = [list(bytes.fromhex(digest)) for digest in digests]
    entry[STANDS_FOR] = torch.tensor(rows, dtype=torch.uint8, device=block.device)
    return entry, stepped


def _export_inner(
    engine: Engine, tensors: Sequence[Tensor], groups: Mapping[int, Any]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the inner optimizer's state of some tensors, and whether they have been stepped."""
    states = [engine.inner.state.get(tensor, {}) for tensor in tensors]
    if any(states):
        return states, True
    try:
        return engine.inner.make_fresh_states(tensors, *groups[id(tensors[0])], stepped=True), False
    except Exception:  # this optimizer cannot be tried, so nothing is known about its state
        return states, False


def encode_about(about: Mapping[str, Any]) -> Tensor:
    """Encode a description as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def _map_tensors(function: Callable[[Tensor], Tensor], state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: tree_map_only(Tensor, function, value) for key, value in state.items()}


def _find_inner_key(place: int, key: Any) -> Any:
    """Return the inner optimizer's name for a key of an entry; None if it belongs to another coordinate tensor."""
    number, slash, name = str(key).partition("/")
    if place > 0:
        return name if slash and number == str(place) else None
    return None if slash and number.isdigit() else key


# --- edits ---


class ExportedState:
    """A state as it was exported, used to detect edits.

    Args:
        engine: the engine of the optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._before = export_state(engine, complete=False)
        self.states: defaultdict[Any, Any] = defaultdict(
            dict, {key: dict(entry) if isinstance(key, Tensor) else entry for key, entry in self._before.items()}
        )
        # Torch's counter of in-place writes, see :func:`egop.optimizer.binding.compares_values`.
        self._versions = {
            (parameter, key): value._version
            for parameter, entry in self._before.items()
            if isinstance(parameter, Tensor)
            for key, value in entry.items()
            if str(key).startswith((BASIS, REFRESH)) and isinstance(value, Tensor)
        }

    def apply_edits(self, engine: Engine) -> None:
        """Apply what was written to the state: new moments or coordinates, or none, which resets them.

        Raises:
            ValueError: if an edit is not possible. Nothing is changed then.
        """
        for parameter, new in engine.bound.find_replaced(engine.param_groups).items():
            if new in self.states and parameter not in self.states:  # its state was given to the new one
                self.states[parameter] = self.states.pop(new)
        edits = {parameter: self._find_edits(parameter) for parameter in self._before if isinstance(parameter, Tensor)}
        for parameter, keys in edits.items():
            for key in keys:
                self._check_edit(engine, parameter, key)
        for (parameter, key), version in self._versions.items():
            if self._before[parameter][key]._version != version:
                raise ValueError(
                    f"'{key}' in optimizer.state was written to in place, so the coordinates no longer belong to it. "
                    "Load a state by optimizer.load_state_dict; change a basis by optimizer.rebase(basis)."
                )
        for parameter, keys in edits.items():
            if keys:
                self._apply_edit(engine, parameter, keys)
        others = {key: value for key, value in self.states.items() if not isinstance(key, Tensor)}
        for key in [key for key in engine.inner.state if not isinstance(key, Tensor) and key not in others]:
            del engine.inner.state[key]
        engine.inner.state.update(others)

    def _find_edits(self, parameter: Tensor) -> set[Any]:
        """Return the keys of an entry whose values have changed, not counting copies with the same values."""
        before, now = self._before[parameter], self.states.get(parameter, {})
        if not isinstance(now, Mapping):
            raise ValueError(f"optimizer.state[parameter] must be a dict, got {now!r:.80}.")
        return {key for key in before.keys() | now.keys() if not _is_same(before.get(key), now.get(key))}

    def _check_edit(self, engine: Engine, parameter: Tensor, key: Any) -> None:
        before, entry = self._before[parameter].get(key), self.states.get(parameter, {})
        if key not in entry:
            return
        block, unchanged = engine.find_block(parameter), "Nothing of what was written has been taken."
        if str(key).startswith(OWN) and not str(key).startswith(COORDINATES):
            raise ValueError(
                f"optimizer.state has another '{key}' than before: a basis cannot be changed there. Use "
                f"optimizer.rebase(basis), or load a whole state by optimizer.load_state_dict. {unchanged}"
            )
        if block is not None and block.originals[0] is not parameter:
            raise ValueError(
                f"optimizer.state has a '{key}' for a parameter of block '{block.name}', whose state is with its first "
                f"parameter, '{block.change.block.parameters[0]}'. {unchanged}"
            )
        if isinstance(before, Tensor) and (not isinstance(entry[key], Tensor) or entry[key].shape != before.shape):
            given = tuple(entry[key].shape) if isinstance(entry[key], Tensor) else type(entry[key]).__name__
            raise ValueError(f"optimizer.state has a '{key}' of {given} where {tuple(before.shape)} was. {unchanged}")

    def _apply_edit(self, engine: Engine, parameter: Tensor, keys: set[Any]) -> None:
        block, now = engine.find_block(parameter), self.states.get(parameter, {})
        if block is not None and block.originals[0] is not parameter:
            return  # its state is with the first parameter
        tensors = [engine.pieces.get(parameter)] if block is None else block.coordinates
        inner_keys = {key for key in now if not str(key).startswith(OWN)}
        is_stepped = any(engine.inner.state.get(tensor) for tensor in tensors)
        if not inner_keys:  # all of it was dropped
            if is_stepped:
                engine.inner.reset(tensors)
            return
        for place, tensor in enumerate(tensors):
            for key in keys if is_stepped else keys | inner_keys:
                if str(key) == f"{COORDINATES}{place}" and key in now:
                    with torch.no_grad():
                        tensor.copy_(to_local(now[key]))
                elif not str(key).startswith(OWN) and (inner_key := _find_inner_key(place, key)) is not None:
                    state = engine.inner.state[tensor]
                    state.pop(inner_key, None)
                    if key in now:
                        state[inner_key] = _write_over(self._before[parameter].get(key), now[key])


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if not isinstance(before, Tensor) or not isinstance(now, Tensor):
        return False
    before, now = to_local(before), to_local(now)
    return before.shape == now.shape and torch.equal(now.to(before), before)


def _write_over(before: Any, value: Any) -> Any:
    """Return a new value, in the memory of the old one if it fits, since that may be part of a stack."""
    if not isinstance(value, Tensor):
        return value
    value = to_local(value)
    if isinstance(before, Tensor) and to_local(before).shape == value.shape:
        with torch.no_grad():
            return to_local(before).copy_(value)
    return value


# --- restoring ---


@dataclass
class RestoredParts:
    """The working parts that a state describes, ready to replace those of an engine."""

    blocks: list[BoundBlock]
    pieces: LocalShards
    inner: InnerOptimizers
    refresher: Refresher | None  # a copy of the optimizer's own, with the loaded state
    with_refresh: bool  # whether the state was saved with a refresh


class _SavedEntry:
    """The saved state of one parameter."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry, self.about = entry, read_about(entry)
        name = self.about["name"]
        for key, value in entry.items():
            if str(key).startswith(OWN) and not (isinstance(value, Tensor) and value.layout == torch.strided):
                raise ValueError(f"{_DAMAGED}: '{key}' of '{name}' is {value!r:.80}. Must be a dense tensor.")
        clock = to_full(entry[CLOCK]) if CLOCK in entry else torch.empty(0, device="cpu")
        if clock.shape != (4,) or clock.is_floating_point() or clock.is_complex():
            raise ValueError(f"{_DAMAGED}: '{CLOCK}' of '{name}' does not hold four counts.")
        *self.counts, self.stepped = clock.tolist()

    def select(self, kind: str) -> dict[str, Any]:
        """Return the tensors of one kind, by the rest of their names."""
        return {key.removeprefix(kind): value for key, value in self.entry.items() if str(key).startswith(kind)}

    def select_numbered(self, kind: str, count: int) -> list[Tensor]:
        """Return the numbered tensors of one kind."""
        tensors = self.select(kind)
        for place in range(count):
            if str(place) not in tensors:
                raise ValueError(f"{_DAMAGED}: it has no '{kind}{place}' of block '{self.about['block']['name']}'.")
        return [tensors[str(place)] for place in range(count)]

    def find_inner(self, place: int) -> dict[Any, Any] | None:
        """Return the inner optimizer's state of one of the coordinates; None before its first step."""
        if not self.stepped:
            return None
        keys = {key: _find_inner_key(place, key) for key in self.entry if not str(key).startswith(OWN)}
        return {inner_key: self.entry[key] for key, inner_key in keys.items() if inner_key is not None}


def read_about(entry: Mapping[str, Any], name: str = "a parameter") -> dict[str, Any]:
    """Return the description in the state of a parameter; error messages refer to it as ``name``."""
    try:
        about: dict[str, Any] = json.loads(to_full(entry[ABOUT]).cpu().numpy().tobytes())
        has_place = type(about.get("place", 0)) is int
    except Exception as error:
        raise ValueError(
            f"{_DAMAGED}: the '{ABOUT}' of {name} cannot be read ({type(error).__name__}: {error})."
        ) from error
    if about.get("version") == STATE_VERSION and not (has_place and about.keys() >= _ABOUT_KEYS):
        raise ValueError(f"{_DAMAGED}: the '{ABOUT}' of {name} is not complete.")
    return about


def parse_state_dict(engine: Engine, state_dict: dict[str, Any]) -> tuple[RestoredParts, list[Group]]:
    """Build the working parts that a state dict describes and its parameter groups, without changing anything."""
    try:
        entries, others = _read_entries(state_dict, engine)
        groups = [
            group | {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            for group, saved in zip(engine.param_groups, state_dict["param_groups"], strict=True)
        ]
        parts = _restore(engine, entries, others, groups)
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
def rebind(engine: Engine) -> RestoredParts:
    """Build the working parts for the groups' current parameters, some of which may be new."""
    groups = engine.param_groups
    before = [group.get("param_names") for group in groups]
    try:
        states = export_state(engine, complete=True)
        bound = zip(engine.bound.names, engine.bound.tensors, strict=True)
        entries = {name: states.pop(tensor) for name, tensor in bound}
        names = iter(engine.bound.find_names(groups))
        for group in groups:
            group["param_names"] = [next(names) for _ in group["params"]]
        ordered = [entries[name] for group in groups for name in group["param_names"]]
        _check_about([read_about(entry) for entry in ordered], groups, engine.base.name)
        parts = _restore(engine, ordered, states)
        if engine.refresher is not None:
            engine.refresher.check(engine)
    except BaseException as error:
        for group, names_before in zip(groups, before, strict=True):
            group.update({} if names_before is None else {"param_names": names_before})
        if not isinstance(error, (TypeError, ValueError)):
            raise
        raise ValueError(
            "The parameters in param_groups are not those that the optimizer was made with, and it cannot continue "
            f"with these. {error}"
        ) from error
    return parts


def _read_entries(state_dict: Any, engine: Engine) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Return the checked state of each parameter in a state dict, and the state that belongs to no parameter.

    Torch's tools leave out frozen parameters; these keep their current state.
    """
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
                current = current or export_state(engine, complete=True)
                entry = current[parameter]
            entries.append(entry)
    names = [f"'{strip_compile_prefix(name)}'" for group in engine.param_groups for name in group["param_names"]]
    _check_about(list(map(read_about, entries, names)), engine.param_groups, engine.base.name)
    keys = {key for group in state_dict["param_groups"] for key in group["params"]}
    others = {key: value for key, value in state.items() if key not in keys}
    if wrong := [key for key in others if not isinstance(key, str)]:
        raise ValueError(f"{_DAMAGED}: it has state of {wrong}, which are not parameters.")
    return entries, others


def _check_groups(saved: list[list[Any]], groups: list[Group]) -> None:
    if len(saved) != len(groups):
        raise ValueError(f"The state dict has {len(saved)} parameter group(s), the optimizer {len(groups)}.")
    for index, (members, group) in enumerate(zip(saved, groups, strict=True)):
        if len(members) != len(group["params"]):
            there = sorted(read_about(entry)["name"] for entry in members if entry is not None)
            here = sorted(map(strip_compile_prefix, group["param_names"]))
            raise ValueError(
                f"The state dict is of another model: its group {index} has {len(members)} parameter(s), {there}, and "
                f"the optimizer's {len(here)}, {here}."
            )
        for name, parameter, entry in zip(group["param_names"], group["params"], members, strict=True):
            if entry is None and parameter.requires_grad:
                raise ValueError(f"{_DAMAGED}: it has no state of '{strip_compile_prefix(name)}'.")


def _check_about(abouts: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], inner_name: str) -> None:
    """Raise ValueError if states are not for this kind of optimizer over these parameters."""
    for about in abouts:
        if about["version"] != STATE_VERSION:
            raise ValueError(f"The state dict has version {about['version']}; this egop reads {STATE_VERSION}.")
        if about["optimizer"] != inner_name:
            raise ValueError(f"The state dict is of {about['optimizer']}, this optimizer runs {inner_name}.")
    members = [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
    here = {strip_compile_prefix(name): list(parameter.shape) for name, parameter in members}
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
    if list(here) != list(there):  # state is matched by position
        raise ValueError(
            f"The state dict has the parameters in another order: {list(there)}, but here {list(here)}. "
            "Give them to the optimizer in the order in which they were saved."
        )


def _restore(
    engine: Engine,
    entries: Sequence[Mapping[str, Any]],
    others: Mapping[Any, Any],
    groups: Sequence[Group] | None = None,
) -> RestoredParts:
    """Build the working parts that states describe for the groups' current parameters, without side effects.

    Args:
        engine: the engine of the optimizer.
        entries: the state of each parameter.
        others: the inner optimizer's state that belongs to no parameter.
        groups: the parameter groups with the hyper-parameters of a state dict, which is then checked.
    """
    saved = [_SavedEntry(entry) for entry in entries]
    of_blocks = sorted((each for each in saved if "block" in each.about), key=lambda each: int(each.about["place"]))
    changes = [_rebuild_change(each) for each in of_blocks]
    try:
        blocks = engine.bind(Basis(changes), engine.param_groups)
    except ValueError as error:
        raise ValueError(str(error) if groups is None else f"{_DAMAGED}: {error}") from error
    for block, each in zip(blocks, of_blocks, strict=True):
        _restore_block(block, each)
    pieces = LocalShards()
    inner = InnerOptimizers(engine.base, engine.param_groups if groups is None else groups, blocks, pieces)
    parameters = [parameter for group in engine.param_groups for parameter in group["params"]]
    block_of = map_to_blocks(blocks)
    states: dict[Tensor, dict[Any, Any] | None] = {}
    labels: dict[Tensor, str] = {}
    for parameter, each in zip(parameters, saved, strict=True):
        owner = block_of.get(id(parameter))
        if owner is None:
            piece = pieces.get(parameter)
            states[piece] = _copy_local(each.find_inner(0), parameter, is_cut=True)
            labels[piece] = f"parameter '{each.about['name']}'"
        elif owner.originals[0] is parameter:
            originals = owner.originals if owner.by_rows else [parameter] * len(owner.coordinates)
            for place, (coordinate, original) in enumerate(zip(owner.coordinates, originals, strict=True)):
                states[coordinate] = _copy_local(each.find_inner(place), original, is_cut=owner.by_rows)
                labels[coordinate] = f"block '{owner.name}'"
    cast = any(str(parameter.dtype) != each.about["dtype"] for parameter, each in zip(parameters, saved, strict=True))
    if groups is not None:
        check_settings(engine.base, groups, engine.param_groups, inner)
        check = StateCheck(inner, cast=cast)
        states = {tensor: check.adapt(state, tensor, labels[tensor]) for tensor, state in states.items()}
    inner.load_state(states, cast=cast)
    inner.state.update(copy.deepcopy(dict(others)))
    with_refresh = any(each.about["refresh"] for each in saved)
    refresher = copy.copy(engine.refresher)
    if refresher is not None and with_refresh:
        refresh_states = {block.name: each.select(REFRESH) for block, each in zip(blocks, of_blocks, strict=True)}
        refresher.load(saved[0].counts, refresh_states, blocks)
    elif refresher is not None:
        refresher.reset()
    return RestoredParts(blocks, pieces, inner, refresher, with_refresh)


def _rebuild_change(saved: _SavedEntry) -> ChangeOfBasis:
    tensors = {key: to_full(tensor).clone() for key, tensor in saved.select(BASIS).items()}
    try:
        return build_change(saved.about["block"], tensors)
    except Exception as error:
        where = f"the basis of '{saved.about['name']}'"
        raise ValueError(f"{_DAMAGED}: {where} cannot be built ({type(error).__name__}: {error}).") from error


def _restore_block(block: BoundBlock, saved: _SavedEntry) -> None:
    digests = None
    if STANDS_FOR in saved.entry and not block.by_rows:
        rows = to_full(saved.entry[STANDS_FOR])
        if rows.shape != (len(block.originals), len(UNKNOWN) // 2) or rows.dtype != torch.uint8:
            raise ValueError(f"{_DAMAGED}: '{STANDS_FOR}' of block '{block.name}' does not hold digests.")
        digests = [bytes(row).hex() for row in rows.tolist()]
    rest = [to_full(tensor) for tensor in saved.select_numbered(REST, len(block.rest or ()))]
    block.restore(saved.select_numbered(COORDINATES, len(block.coordinates)), rest, digests)


def _copy_local(state: Mapping[Any, Any] | None, original: Tensor, *, is_cut: bool) -> dict[Any, Any] | None:
    """Copy the tensors of a state as this process holds them: only its rows if the parameter is sharded by rows."""
    if state is None:
        return None

    def copy_tensor(value: Tensor) -> Tensor:
        if value.dim() == 0:
            return to_full(value).clone()
        return (take_shard(value, original) if is_cut else to_full(value)).to(original.device, copy=True)

    return _map_tensors(copy_tensor, state)

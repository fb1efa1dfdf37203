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

from egop.basis import Basis, build_change
from egop.distributed import LocalShards, take_shard, to_full, to_local
from egop.optimizer.binding import BoundBlock, map_to_blocks
from egop.optimizer.engine import Engine
from egop.optimizer.groups import named_parameters
from egop.optimizer.inner import Group, InnerOptimizers
from egop.optimizer.refreshing import Refresher
from egop.optimizer.state_checks import StateCheck

STATE_VERSION = 2

OWN = "egop/"
ABOUT, CLOCK = f"{OWN}about", f"{OWN}clock"
BASIS, COORDINATES, REST, REFRESH = (f"{OWN}{kind}/" for kind in ("basis", "coordinates", "rest", "refresh"))

Entry = dict[str, Any]  # the state of one parameter


# --- export ---


def export_state(engine: Engine, *, complete: bool) -> dict[Any, Entry]:
    """Return the state of every parameter; its tensors are the optimizer's own.

    A parameter that has not been stepped gets the state that it will have after a step, marked as not stepped: tools
    that load a checkpoint in place need to know what is in it. A state dict is ``complete``: coordinates and bases are
    copies, since they belong to the weights of this moment, and processes are summed.
    """
    refresher = engine.refresher
    if refresher is not None:
        refresher.prepare(engine)
    places = {block.name: place for place, block in enumerate(engine.blocks)}
    refresh_states = {} if refresher is None else refresher.block_states(engine, complete=complete)
    counts = [0, 0, 0] if refresher is None else refresher.counts()
    groups = engine.inner.map_to_groups()
    block_of = map_to_blocks(engine.blocks)
    states: dict[Any, Entry] = {}
    bound = engine.bound
    for name, parameter, (dtype, *_) in zip(bound.names, bound.tensors, bound.kinds, strict=True):
        block = block_of.get(id(parameter))
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
            inner, stepped = _export_inner(engine, block.coordinates, groups)
            entry = _export_block(block, inner, complete=complete)
            entry |= {f"{REFRESH}{key}": tensor for key, tensor in refresh_states.get(block.name, {}).items()}
            about |= {"place": places[block.name], "block": block.whole_change().describe()}
        entry[CLOCK] = torch.tensor([*counts, stepped], device=parameter.device)
        entry[ABOUT] = encode_about(about).to(parameter.device)
        states[parameter] = entry
    return states | engine.inner.shared_state


def _export_block(block: BoundBlock, states: Sequence[Mapping[str, Any]], *, complete: bool) -> Entry:
    def take(tensor: Tensor) -> Tensor:
        return tensor.clone() if complete else tensor

    entry: Entry = {}
    for place, (coordinate, state) in enumerate(zip(block.coordinates, states, strict=True)):
        if block.by_rows:
            state = _map_tensors(partial(block.as_sharded, place), state)
        # Nearly all blocks have one coordinate tensor, which needs no number.
        entry |= {key if place == 0 else f"{place}/{key}": value for key, value in state.items()}
        entry[f"{COORDINATES}{place}"] = block.as_sharded(place, take(coordinate.detach()))
    entry |= {f"{BASIS}{key}": take(tensor) for key, tensor in block.change.tensors.items()}
    entry |= {f"{REST}{place}": take(tensor) for place, tensor in enumerate(block.rest or [])}
    return entry


def _export_inner(
    engine: Engine, tensors: Sequence[Tensor], groups: Mapping[int, Any]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the inner optimizer's state of some tensors, and whether they have been stepped."""
    states = [engine.inner.state.get(tensor, {}) for tensor in tensors]
    if any(states):
        return states, True
    try:
        return engine.inner.make_fresh_states(tensors, *groups[id(tensors[0])], steps=1), False
    except Exception:  # this optimizer cannot be tried, so nothing is known about its state
        return states, False


def encode_about(about: Mapping[str, Any]) -> Tensor:
    """Encode a description as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)


def _map_tensors(function: Callable[[Tensor], Tensor], state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: tree_map_only(Tensor, function, value) for key, value in state.items()}


# --- edits ---


class ExportedState:
    """A state as it was exported, used to detect edits."""

    def __init__(self, engine: Engine, *, complete: bool = False) -> None:
        self._before = export_state(engine, complete=complete)
        self.states: defaultdict[Any, Any] = defaultdict(
            dict, {key: dict(entry) if isinstance(key, Tensor) else entry for key, entry in self._before.items()}
        )
        self._versions = {
            id(value): value._version  # torch's counter of in-place writes
            for parameter, entry in self._before.items()
            for key, value in (entry.items() if isinstance(parameter, Tensor) else ())
            if str(key).startswith(BASIS)
        }

    def find_edits(self, engine: Engine) -> dict[Tensor, Mapping[Any, Any]]:
        """Return the entries that were changed, by parameter.

        Copies with the same values do not count, nor do writes in place: the tensors are the optimizer's own.
        """
        for parameter, new in engine.bound.find_replaced(engine.param_groups).items():
            if new in self.states and parameter not in self.states:  # its state was given to the new one
                self.states[parameter] = self.states.pop(new)
        edits = {}
        for parameter, before in self._before.items():
            now = self.states.get(parameter, {})
            if isinstance(parameter, Tensor) and not isinstance(now, Mapping):
                raise ValueError(f"optimizer.state[parameter] must be a dict, got {now!r:.80}.")
            if isinstance(parameter, Tensor) and self._is_changed(before, now):
                edits[parameter] = now
        engine.inner.shared_state = {key: value for key, value in self.states.items() if not isinstance(key, Tensor)}
        return edits

    def _is_changed(self, before: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
        changed = {key for key in before.keys() | now.keys() if not _is_same(before.get(key), now.get(key))}
        for key in changed | {key for key, value in before.items() if self._is_written(value)}:
            if str(key).startswith(OWN) and key in now:
                raise ValueError(
                    f"'{key}' was changed in optimizer.state, which is not supported. Write to the parameter itself, "
                    "use optimizer.rebase(basis), or load a whole state with optimizer.load_state_dict. Nothing "
                    "was applied."
                )
        return bool(changed)

    def _is_written(self, value: Any) -> bool:
        return id(value) in self._versions and value._version != self._versions[id(value)]


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if not isinstance(before, Tensor) or not isinstance(now, Tensor):
        return False
    before, now = to_local(before), to_local(now)
    return before.shape == now.shape and torch.equal(now.to(before), before)


def _apply_edit(entry: Entry, edited: Mapping[Any, Any], block: BoundBlock | None, parameter: Tensor) -> Entry:
    """Return an entry with the inner optimizer's state from an edited one; without any, the state starts afresh."""
    inner = {key: value for key, value in edited.items() if not str(key).startswith(OWN)}
    if inner and block is not None and block.originals[0] is not parameter:
        raise ValueError(
            f"It has {sorted(map(str, inner))} for a parameter of block '{block.name}', whose state is stored with its "
            f"first parameter, '{block.change.block.parameters[0]}'."
        )
    clock = entry[CLOCK].clone()
    clock[-1] = bool(inner)
    return {key: value for key, value in entry.items() if str(key).startswith(OWN)} | inner | {CLOCK: clock}


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
        for key, value in entry.items():
            if str(key).startswith(OWN) and not (isinstance(value, Tensor) and value.layout == torch.strided):
                raise ValueError(f"'{key}' of '{self.about['name']}' is {value!r:.80}. Must be a dense tensor.")
        steps, renewals, failures, self.stepped = map(int, to_full(entry[CLOCK]).tolist())
        self.counts = [steps, renewals, failures]

    def select(self, kind: str) -> dict[str, Any]:
        """Return the tensors of one kind, by the rest of their names."""
        return {key.removeprefix(kind): value for key, value in self.entry.items() if str(key).startswith(kind)}

    def select_numbered(self, kind: str, count: int) -> list[Tensor]:
        """Return the numbered tensors of one kind."""
        tensors = self.select(kind)
        for place in range(count):
            if str(place) not in tensors:
                raise ValueError(f"It has no '{kind}{place}' of block '{self.about['block']['name']}'.")
        return [tensors[str(place)] for place in range(count)]

    def find_inner(self, place: int) -> dict[Any, Any]:
        """Return the inner optimizer's state of one of the coordinates; nothing before its first step."""
        found = {}
        for key, value in self.entry.items() if self.stepped else ():
            number, slash, name = str(key).partition("/")
            is_numbered = bool(slash) and number.isdigit()
            if number + slash != OWN and (int(number) if is_numbered else 0) == place:
                found[name if is_numbered else key] = value
        return found


def read_about(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description in the state of a parameter."""
    try:
        about: dict[str, Any] = json.loads(to_full(entry[ABOUT]).cpu().numpy().tobytes())
    except Exception as error:
        raise ValueError(f"An '{ABOUT}' cannot be read ({type(error).__name__}: {error}).") from error
    return about


def parse_state_dict(engine: Engine, state_dict: dict[str, Any]) -> tuple[RestoredParts, list[Group]]:
    """Build the working parts that a state dict describes and its parameter groups, without changing anything."""
    try:
        if "state" not in state_dict or "param_groups" not in state_dict:
            raise ValueError(
                "It needs 'state' and 'param_groups'. From a whole checkpoint, load the part that "
                "optimizer.state_dict() returned."
            )
        entries, others = _read_entries(state_dict, engine)
        groups = [
            group | copy.deepcopy({key: value for key, value in saved.items() if key not in ("params", "param_names")})
            for group, saved in zip(engine.param_groups, state_dict["param_groups"], strict=True)
        ]
        parts = _restore(engine, entries, others, groups)
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}."
        raise ValueError(f"The state dict does not fit this optimizer, or is damaged. {text}") from error
    return parts, groups


@torch.no_grad()
def rebuild(engine: Engine, edits: Mapping[Tensor, Mapping[Any, Any]]) -> RestoredParts:
    """Build the working parts for the groups' current parameters, some of which may be new, with an edited state."""
    groups = engine.param_groups
    before = [group.get("param_names") for group in groups]
    try:
        names = iter(engine.bound.find_names(groups))
        for group in groups:  # first, since the export may create blocks
            group["param_names"] = [next(names) for _ in group["params"]]
        states, block_of = export_state(engine, complete=True), map_to_blocks(engine.blocks)
        for parameter, edited in edits.items():
            states[parameter] = _apply_edit(states[parameter], edited, block_of.get(id(parameter)), parameter)
        bound = zip(engine.bound.names, engine.bound.tensors, strict=True)
        entries = {name: states.pop(tensor) for name, tensor in bound}
        ordered = [entries[name] for group in groups for name in group["param_names"]]
        _check_about([read_about(entry) for entry in ordered], groups, engine.base.name)
        parts = _restore(engine, ordered, states, groups)
    except BaseException as error:
        for group, names_before in zip(groups, before, strict=True):
            group.update({} if names_before is None else {"param_names": names_before})
        if not isinstance(error, (TypeError, ValueError)):
            raise
        what = "optimizer.state was changed" if edits else "The parameters in param_groups were replaced"
        raise ValueError(f"{what}, and training cannot continue with this. {error} Nothing was applied.") from error
    return parts


def _read_entries(state_dict: Any, engine: Engine) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """Return the checked state of each parameter in a state dict, and the state that belongs to no parameter.

    Torch's tools leave out frozen parameters; these keep their current state.
    """
    state, groups = state_dict["state"], engine.param_groups
    if not any(ABOUT in item for item in state.values() if isinstance(item, Mapping)):
        raise ValueError(
            "It was saved by another optimizer. Moments from another coordinate system cannot be loaded: load the "
            "model's weights alone, and start with a new optimizer."
        )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    abouts = [read_about(state[key]) for key in keys if key in state]
    sizes, wanted = ([len(group["params"]) for group in each] for each in (state_dict["param_groups"], groups))
    if sizes != wanted:
        names = [about["name"] for about in abouts]
        raise ValueError(f"It has groups of {sizes} parameters ({names}), this optimizer has {wanted}.")
    current = None
    entries = []
    for (name, parameter), key in zip(named_parameters(groups).items(), keys, strict=True):
        if key not in state and parameter.requires_grad:
            raise ValueError(f"It has no state for '{name}'.")
        if key not in state:
            current = current or export_state(engine, complete=True)
        entries.append(current[parameter] if current is not None and key not in state else state[key])
    _check_about(list(map(read_about, entries)), groups, engine.base.name)
    others = {key: value for key, value in state.items() if key not in keys}
    if wrong := [key for key in others if not isinstance(key, str)]:
        raise ValueError(f"It has state for {wrong}, which are not parameters.")
    return entries, others


def _check_about(abouts: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], inner_name: str) -> None:
    """Raise ValueError if states are not for this kind of optimizer over these parameters."""
    for about in abouts:
        if about["version"] != STATE_VERSION:
            raise ValueError(f"It has version {about['version']}; this egop reads {STATE_VERSION}.")
        if about["optimizer"] != inner_name:
            raise ValueError(f"It was saved with {about['optimizer']}, but this optimizer runs {inner_name}.")
    here = {name: list(parameter.shape) for name, parameter in named_parameters(groups).items()}
    there = {about["name"]: about["shape"] for about in abouts}
    if here.keys() != there.keys():
        raise ValueError(
            f"It was saved for another model: only it has {sorted(there.keys() - here.keys())}, "
            f"only the optimizer has {sorted(here.keys() - there.keys())}."
        )
    for name, shape in here.items():
        if shape != there[name]:
            raise ValueError(f"Its '{name}' has shape {tuple(there[name])}, but here it has {tuple(shape)}.")
    if list(here) != list(there):  # state is matched by position
        raise ValueError(
            f"It has the parameters in another order: {list(there)}, but here {list(here)}. "
            "Pass them to the optimizer in the order in which they were saved."
        )


def _restore(
    engine: Engine, entries: Sequence[Mapping[str, Any]], others: Mapping[Any, Any], groups: Sequence[Group]
) -> RestoredParts:
    """Build the working parts that states describe for the groups' current parameters, without side effects."""
    saved = [_SavedEntry(entry) for entry in entries]
    of_blocks = sorted((each for each in saved if "block" in each.about), key=lambda each: int(each.about["place"]))
    changes = []
    for each in of_blocks:
        tensors = {key: to_full(tensor).clone() for key, tensor in each.select(BASIS).items()}
        changes.append(build_change(each.about["block"], tensors))
    blocks = engine.bind(Basis(changes), engine.param_groups)
    for block, each in zip(blocks, of_blocks, strict=True):
        rest = [to_full(tensor) for tensor in each.select_numbered(REST, len(block.rest or ()))]
        block.restore(each.select_numbered(COORDINATES, len(block.coordinates)), rest)
    pieces = LocalShards()
    inner = InnerOptimizers(engine.base, groups, blocks, pieces)
    parameters = [parameter for group in engine.param_groups for parameter in group["params"]]
    cast = any(str(parameter.dtype) != each.about["dtype"] for parameter, each in zip(parameters, saved, strict=True))
    check, block_of = StateCheck(inner, cast=cast), map_to_blocks(blocks)
    states: dict[Tensor, dict[Any, Any]] = {}
    for parameter, each in zip(parameters, saved, strict=True):
        owner = block_of.get(id(parameter))
        if owner is None:
            piece = pieces.get(parameter)
            local = _take_local(each.find_inner(0), parameter, is_cut=True)
            states[piece] = check.adapt(local, piece, f"parameter '{each.about['name']}'")
        elif owner.originals[0] is parameter:
            originals = owner.originals if owner.by_rows else [parameter] * len(owner.coordinates)
            for place, (coordinate, original) in enumerate(zip(owner.coordinates, originals, strict=True)):
                local = _take_local(each.find_inner(place), original, is_cut=owner.by_rows)
                states[coordinate] = check.adapt(local, coordinate, f"block '{owner.name}'")
    # Optimizers that create states in their constructor keep those.
    inner.state.update({tensor: state for tensor, state in states.items() if state})
    inner.shared_state = copy.deepcopy(dict(others))
    with_refresh = any(each.about["refresh"] for each in saved)
    refresher = copy.copy(engine.refresher)
    if refresher is not None and with_refresh:
        refresh_states = {block.name: each.select(REFRESH) for block, each in zip(blocks, of_blocks, strict=True)}
        refresher.load(saved[0].counts, refresh_states, blocks)
    elif refresher is not None:
        refresher.reset()
    if refresher is not None:
        refresher.check(engine, [block.change for block in blocks])
    return RestoredParts(blocks, pieces, inner, refresher, with_refresh)


def _take_local(state: Mapping[Any, Any], original: Tensor, *, is_cut: bool) -> dict[Any, Any]:
    """Return a state as this process holds it: only its rows if the parameter is sharded by rows."""

    def take(value: Tensor) -> Tensor:
        return take_shard(value, original) if is_cut and value.dim() > 0 else to_full(value)

    return _map_tensors(take, state)

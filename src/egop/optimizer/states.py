"""The state of an optimizer by parameter, where torch's own tools look for it: what is in it, and the way back.

``state[parameter]`` has the inner optimizer's state of the parameter (or of its coordinates) under the names that this
optimizer uses, and beside it, with names that begin with ``egop/``: the block's coordinates and basis, what the refresh
remembers of it, and what all this is of. A block of several parameters is with its first one. All of it is tensors
(beside what the inner optimizer keeps), so that every tool can carry it, under the parameter's name.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from egop.distributed import to_local
from egop.optimizer.binding import UNKNOWN, BoundBlock
from egop.optimizer.engine import Engine
from egop.optimizer.inner import fresh_states

STATE_VERSION = 2

OWN = "egop/"
ABOUT, CLOCK, STANDS_FOR = f"{OWN}about", f"{OWN}clock", f"{OWN}stands_for"
BASIS, COORDINATES, REST, REFRESH = (f"{OWN}{kind}/" for kind in ("basis", "coordinates", "rest", "refresh"))

Entry = dict[str, Any]  # the state of one parameter
Groups = Mapping[int, Mapping[str, Any]]  # the group of each tensor that the inner optimizer steps, by its id


def exported(engine: Engine, *, complete: bool) -> dict[Any, Entry]:
    """The state of every parameter; its tensors are the optimizer's own.

    A parameter that has not been stepped has a state as it will be then, and a note that it does not count: tools that
    read a checkpoint in place need to know what is in it.

    Args:
        engine: of the optimizer.
        complete: whether to add what takes time: digests of the parameters, and sums over processes.
    """
    if engine.refresher is not None:
        engine.refresher.prepare(engine)
    inside = {id(original): (place, block) for place, block in enumerate(engine.blocks) for original in block.originals}
    refresher = engine.refresher
    remembered = {} if refresher is None else refresher.block_states(engine, complete=complete)
    counts = [0, 0, 0] if refresher is None else refresher.counts()
    states: dict[Any, Entry] = {}
    bound = engine.bound
    groups = {id(tensor): group for group in engine.inner.param_groups for tensor in group["params"]}
    for name, parameter, dtype in zip(bound.names, bound.members, bound.dtypes, strict=True):
        place, block = inside.get(id(parameter), (None, None))
        about = {"version": STATE_VERSION, "optimizer": engine.base.name, "name": name}
        about |= {"shape": list(parameter.shape), "dtype": str(dtype), "refresh": refresher is not None}
        entry, stepped = {}, False
        if block is None:
            piece = engine.pieces.get(parameter)
            inner, stepped = _inner_state(engine, [piece], groups)
            entry = dict(inner[0])
            if piece is not parameter:
                entry = {key: mapped(value, engine.pieces.as_sharded(piece)) for key, value in entry.items()}
        elif block.originals[0] is parameter:
            entry, stepped = _of_block(engine, block, groups, complete=complete)
            entry |= {f"{REFRESH}{key}": tensor for key, tensor in remembered.get(block.name, {}).items()}
            about |= {"place": place, "block": block.whole_change().describe()}
        entry[CLOCK] = torch.tensor([*counts, stepped], device=parameter.device)
        entry[ABOUT] = _as_bytes(about).to(parameter.device)
        states[parameter] = entry
    others = {key: value for key, value in engine.inner.state.items() if not isinstance(key, Tensor)}
    return states | others


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _of_block(engine: Engine, block: BoundBlock, groups: Groups, *, complete: bool) -> tuple[Entry, bool]:
    # Copies for a state dict: who keeps one keeps digests with them, of the parameters that they stand for.
    taken = torch.clone if complete else _as_it_is
    entry: Entry = {}
    states, stepped = _inner_state(engine, block.coordinates, groups)
    for place, (coordinate, state) in enumerate(zip(block.coordinates, states, strict=True)):
        for key, value in state.items():
            entry[_key(place, key)] = mapped(value, partial(block.as_sharded, place)) if block.by_rows else value
        entry[f"{COORDINATES}{place}"] = block.as_sharded(place, taken(coordinate.detach()))
    entry |= {f"{BASIS}{key}": taken(tensor) for key, tensor in block.change.tensors.items()}
    entry |= {f"{REST}{place}": taken(tensor) for place, tensor in enumerate(block.rest or [])}
    # Torch's tools ask for what is in a state before they load one: the place is always there.
    # Digests of the rows of one process would mean nothing to the others.
    digests = block.stand_for() if complete and not block.by_rows else [UNKNOWN] * len(block.originals)
    if complete and block.by_rows:
        block.mark_saved()
    rows = [list(bytes.fromhex(digest)) for digest in digests]
    entry[STANDS_FOR] = torch.tensor(rows, dtype=torch.uint8, device=block.device)
    return entry, stepped


def _inner_state(engine: Engine, tensors: Sequence[Tensor], groups: Groups) -> tuple[list[dict[str, Any]], bool]:
    """The inner optimizer's state of some tensors, and whether it counts: before their first step it does not."""
    states = [engine.inner.state.get(tensor, {}) for tensor in tensors]
    if any(states):
        return states, True
    try:
        group = groups[id(tensors[0])]
        return fresh_states(engine.inner, tensors, engine.base.make, stepped=True, group=group), False
    except Exception:  # an optimizer that cannot take a step so; then nothing is known of its state
        return states, False


def _key(place: int, key: Any) -> Any:
    """Where the state of a block's coordinates goes: nearly all have one tensor of them, which needs no number."""
    return key if place == 0 else f"{place}/{key}"


def _as_bytes(values: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A value of a state with a function applied to its tensors, also to those in containers."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((mapped(item, function) for item in value), maxlen=value.maxlen)
    if isinstance(value, list | tuple):
        parts = [mapped(item, function) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


class Published:
    """A state as it was handed out, so that what someone writes to it is noticed.

    Args:
        engine: of the optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._kept = exported(engine, complete=False)
        self.states: defaultdict[Any, Any] = defaultdict(
            dict, {key: dict(entry) if isinstance(key, Tensor) else entry for key, entry in self._kept.items()}
        )
        # Torch's counter of writes to a tensor, see :func:`egop.optimizer.binding._look`.
        self._versions = {
            (parameter, key): value._version
            for parameter, entry in self._kept.items()
            if isinstance(parameter, Tensor)
            for key, value in entry.items()
            if str(key).startswith((BASIS, REFRESH)) and isinstance(value, Tensor)
        }

    def take_in(self, engine: Engine) -> None:
        """Give the optimizer what was written: other moments or coordinates; none, to begin anew.

        Raises:
            ValueError: for what cannot be changed so. Nothing is taken in then.
        """
        for parameter, new in engine.bound.replaced_in(
            engine.param_groups
        ).items():  # its state may have been given to the new one
            if new in self.states and parameter not in self.states:
                self.states[parameter] = self.states.pop(new)
        parameters = [key for key in self._kept if isinstance(key, Tensor)]
        writes = {parameter: self._written(parameter) for parameter in parameters}
        for parameter, keys in writes.items():
            for key in keys:
                self._check(engine, parameter, key)
        for (parameter, key), version in self._versions.items():
            if self._kept[parameter][key]._version != version:
                raise ValueError(
                    f"'{key}' in optimizer.state was written to in place, which leaves coordinates that mean something "
                    "else. Load a state by optimizer.load_state_dict; a basis is changed by optimizer.rebase(basis)."
                )
        for parameter, keys in writes.items():
            if keys:
                self._take(engine, parameter, keys)
        others = {key: value for key, value in self.states.items() if not isinstance(key, Tensor)}
        for key in [key for key in engine.inner.state if not isinstance(key, Tensor) and key not in others]:
            del engine.inner.state[key]
        engine.inner.state.update(others)

    def _written(self, parameter: Tensor) -> set[Any]:
        """The keys of an entry that have another value than before; one that was only copied or moved is the same."""
        kept, now = self._kept[parameter], self.states.get(parameter, {})
        if not isinstance(now, Mapping):
            raise ValueError(f"optimizer.state[parameter] must be a dict, got {now!r:.80}.")
        return {key for key in kept.keys() | now.keys() if not _is_same(kept.get(key), now.get(key))}

    def _check(self, engine: Engine, parameter: Tensor, key: Any) -> None:
        """Raise an error for what cannot be written."""
        kept, entry = self._kept[parameter].get(key), self.states.get(parameter, {})
        block, refused = engine.block_of(parameter), "Nothing of what was written has been taken."
        if key not in entry:
            return
        if str(key).startswith(OWN) and not str(key).startswith(COORDINATES):
            raise ValueError(
                f"optimizer.state has another '{key}' than before: a basis cannot be changed there. Use "
                f"optimizer.rebase(basis), or load a whole state by optimizer.load_state_dict. {refused}"
            )
        if block is not None and block.originals[0] is not parameter:
            raise ValueError(
                f"optimizer.state has a '{key}' for a parameter of block '{block.name}', whose state is with its first "
                f"parameter, '{block.change.block.parameters[0]}'. {refused}"
            )
        if isinstance(kept, Tensor) and (not isinstance(entry[key], Tensor) or entry[key].shape != kept.shape):
            given = tuple(entry[key].shape) if isinstance(entry[key], Tensor) else type(entry[key]).__name__
            raise ValueError(f"optimizer.state has a '{key}' of {given} where {tuple(kept.shape)} was. {refused}")

    def _take(self, engine: Engine, parameter: Tensor, keys: set[Any]) -> None:
        block, now = engine.block_of(parameter), self.states.get(parameter, {})
        if block is not None and block.originals[0] is not parameter:
            return  # its state is with the first one
        tensors = [engine.pieces.get(parameter)] if block is None else block.coordinates
        inner = {key for key in now if not str(key).startswith(OWN)}
        if not inner:  # all of it dropped
            if any(engine.inner.state.get(tensor) for tensor in tensors):
                fresh = fresh_states(engine.inner, tensors, engine.base.make)
                engine.inner.state.update(zip(tensors, fresh, strict=True))
            return
        if not any(engine.inner.state.get(tensor) for tensor in tensors):
            keys = keys | inner  # what was there in form only now counts
        for place, tensor in enumerate(tensors):
            for key in keys:
                if str(key) == f"{COORDINATES}{place}" and key in now:
                    with torch.no_grad():
                        tensor.copy_(to_local(now[key]))
                elif not str(key).startswith(OWN) and (inner_key := key_at(place, key)) is not None:
                    state = engine.inner.state[tensor]
                    state.pop(inner_key, None)
                    if key in now:
                        state[inner_key] = _like_before(self._kept[parameter].get(key), now[key])


def key_at(place: int, key: Any) -> Any:
    """The inner optimizer's key in one place, if this key of an entry is of that place."""
    if place > 0:
        return str(key).removeprefix(f"{place}/") if str(key).startswith(f"{place}/") else None
    return None if str(key).partition("/")[0].isdigit() and "/" in str(key) else key


def _is_same(kept: Any, now: Any) -> bool:
    if kept is now:
        return True
    if not isinstance(kept, Tensor) or not isinstance(now, Tensor):
        return False
    kept, now = to_local(kept), to_local(now)
    return kept.shape == now.shape and torch.equal(now.to(kept), kept)


def _like_before(kept: Any, value: Any) -> Any:
    """A value where the one before was; in the same memory if that has room for it, since it may be part of more."""
    if not isinstance(value, Tensor):
        return value
    value = to_local(value)
    if isinstance(kept, Tensor) and to_local(kept).shape == value.shape:
        with torch.no_grad():
            return to_local(kept).copy_(value)
    return value

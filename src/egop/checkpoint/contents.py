"""What a checkpoint holds of a model and its optimizer, and whether it fits others.

An error in one process is heard of by all at the end of a stage. What is exchanged is therefore a stage of its own: a
process that failed on the way to it would leave the others waiting there, and all that follows out of step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from egop.basis import WRAPPER, plain_name
from egop.checkpoint.files import Saved, with_text
from egop.checkpoint.flat import apart, together
from egop.distributed import agreed, below_each_other, exchanged, is_cut_by_rows, is_sharded, like, local, rank, shards
from egop.optimizer import (
    COORDINATES,
    OWN,
    REFRESH,
    STANDS_FOR,
    ReparameterizedOptimizer,
    about_of,
    check_about,
    exported,
)

_VERSION = 2


def taken_apart(model: nn.Module, optimizer: ReparameterizedOptimizer, extra: dict[str, Any]) -> dict[str, Tensor]:
    """All that is saved, as tensors by name: among processes, which call this together, what each of them has."""
    agreed(lambda: check_kind(optimizer))
    state = agreed(optimizer.state_dict)  # first, since it may make the blocks
    agreed(lambda: _look(optimizer))
    unwritten = exchanged(lambda: [not block.was_written for block in optimizer.blocks])
    tensors: dict[str, Tensor] = {}
    rows = agreed(lambda: _rows(optimizer, state))
    plain = agreed(lambda: _plain(model, state, tensors))
    _check_alike(tensors)
    # Coordinates stand for parameters to which nobody else has written, in any process.
    plain["stand_for"] = [all(flags) for flags in zip(*unwritten, strict=True)]

    def described() -> dict[str, Tensor]:
        plain["extra"] = apart(extra, tensors, "extra")
        return with_text(tensors, {"version": _VERSION, "values": plain, "rows": rows})

    return agreed(lambda: described() if rank() == 0 else tensors)


def check_same(directory: Path, saved: Saved) -> None:
    """What processes load together must be one checkpoint.

    Raises:
        ValueError: in all of them, if it is not.
    """
    # By its name and its text: the folder above may have another path in each process.
    everywhere = exchanged(lambda: (str(directory), (directory.name, saved.digest)))
    for place, (folder, mark) in enumerate(everywhere):
        if mark != everywhere[0][1]:
            raise ValueError(
                f"The processes load different checkpoints: process 0 {everywhere[0][0]}, process {place} {folder}. "
                "Give all of them the same one, as egop.checkpoint.latest does when all call it."
            )


def fitted(saved: Saved, model: nn.Module, optimizer: ReparameterizedOptimizer) -> dict[str, Any]:
    """The values of a checkpoint, with places for its tensors as this model and this optimizer want them.

    Raises:
        ValueError: if they are of another model, or of another kind of optimizer.
    """
    if saved.content["version"] != _VERSION:
        raise ValueError(f"The checkpoint has version {saved.content['version']}; this egop reads {_VERSION}.")
    weights = model.state_dict()
    parameters = {
        plain_name(name): parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    rows = saved.content["rows"]

    def tensor(path: str) -> Tensor:
        kind, _, name = path.partition("/")
        if kind == "model":
            weight = weights[names[name]]
            if saved.shape(path) != weight.shape:
                raise ValueError(
                    f"The checkpoint is of another model: '{name}' has shape {tuple(saved.shape(path))} there, but "
                    f"{tuple(weight.shape)} here."
                )
            return saved.place(path, lambda shape, dtype: torch.empty_like(weight))
        original = parameters[rows[path]["of"]] if path in rows else None
        if original is None or not is_sharded(original) or (rows[path]["cut"] and not is_cut_by_rows(original)):
            return saved.place(path, torch.empty)
        if (parts := rows[path].get("parts")) is None:
            return saved.place(path, lambda shape, dtype: _sharded(shape, dtype, original))
        if parts != shards(original):
            return saved.place(path, torch.empty)
        return saved.place(path, lambda shape, dtype: _room_for_part(shape, dtype, original, parts))

    names = _names(weights)
    plain = saved.content["values"]
    _check_names([name for name, _ in plain["model"]["dict"]], names)
    # What the states are of is there as plain values too, so that they can be compared before a place is made.
    abouts = plain.pop("about")
    check_about(abouts, optimizer.param_groups, optimizer._engine.base.name)
    values = {key: together(value, tensor) for key, value in plain.items()}
    for name, value in values["model"].items():
        if isinstance(value, Tensor) != isinstance(weights[names[name]], Tensor):
            raise LookupError(f"'{name}' is a tensor in the model or in the checkpoint, but not in both")
    if not isinstance(values["stand_for"], list) or len(values["stand_for"]) != sum("block" in each for each in abouts):
        raise LookupError("'stand_for' is not a list with a word for each block")
    if not isinstance(values["extra"], dict):
        raise LookupError("'extra' is not a dictionary")
    return values


def sum_parts(saved: Saved, values: dict[str, Any]) -> None:
    """Where other numbers of processes have saved parts of a sum, take their sum."""
    for path, row in saved.content["rows"].items():
        if "parts" in row:
            _, _, index, key = path.split("/", 3)
            entry = values["optimizer"]["state"][int(index)]
            if not is_sharded(entry[key]):
                entry[key] = entry[key].unflatten(0, (row["parts"], -1)).sum(0)


def extra_of(saved: Saved) -> dict[str, Any]:
    """What a checkpoint has beside the model and the optimizer."""
    extra: dict[str, Any] = together(saved.content["values"]["extra"], lambda path: saved.place(path, torch.empty))
    saved.read()
    return extra


def give(values: dict[str, Any], model: nn.Module) -> None:
    """Load the weights."""
    names = _names(model.state_dict())
    model.load_state_dict({names[name]: value for name, value in values["model"].items()})


def trust(values: dict[str, Any], optimizer: ReparameterizedOptimizer) -> None:
    """Note for which weights, now that these are loaded, the coordinates stand."""
    _look(optimizer)
    for block, stands in zip(optimizer.blocks, values["stand_for"], strict=True):
        if stands:
            block.note()


def _names(weights: Iterable[str]) -> dict[str, str]:
    """The names in a model's state dict by those that the plain model has."""
    plain = {plain_name(name): name for name in weights}
    if plain and all(name.startswith(WRAPPER) for name in plain):
        return {name.removeprefix(WRAPPER): original for name, original in plain.items()}
    return plain


def _rows(optimizer: ReparameterizedOptimizer, state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For the tensors that go with the rows of a parameter that name, and whether it must be cut by rows.

    What each process has of a sum over the rows is saved too, and said so: they go on with just that if they can.
    """
    engine = optimizer._engine
    here = exported(engine, complete=False)
    rows = {}
    for index, parameter in enumerate(engine.bound.members):
        part = here[parameter]
        block, entry = engine.block_of(parameter), state["state"][index]
        entry.pop(STANDS_FOR, None)  # digests of the rows that one process has say nothing to others
        if block is not None and not block.rowwise:
            continue
        originals = [parameter] if block is None else block.originals
        names = [about_of(here[original])["name"] for original in originals]
        for key, value in entry.items():
            place = f"optimizer/state/{index}/{key}"
            if key.startswith(REFRESH) and block is not None and block.by_rows and value.dim() == 2:
                entry[key] = below_each_other(part[key], parameter)
                rows[place] = {"of": names[0], "cut": True, "parts": shards(parameter)}
            elif (
                isinstance(value, Tensor)
                and value.dim() > 0
                and (not key.startswith(OWN) or key.startswith(COORDINATES))
            ):
                number = key.removeprefix(COORDINATES).partition("/")[0]
                rows[place] = {"of": names[int(number) if number.isdigit() else 0], "cut": block is not None}
    return rows


def _room_for_part(shape: torch.Size, dtype: torch.dtype, original: Any, parts: int) -> Tensor:
    """A place for what this process has of a sum."""
    return below_each_other(local(original).new_empty((shape[0] // parts, *shape[1:]), dtype=dtype), original)


def _sharded(shape: torch.Size, dtype: torch.dtype, original: Any) -> Tensor:
    """A place for a tensor that is sharded over the processes as a parameter is."""
    here = local(original)
    if shape == original.shape:
        return torch.empty_like(original, dtype=dtype)
    return like(here.new_empty((here.shape[0], *shape[1:]), dtype=dtype), original)


def _look(optimizer: ReparameterizedOptimizer) -> None:
    """Look at sharded parameters as they are now, which gathers some of them."""
    for block in optimizer.blocks:
        if block.sharded:
            block.pull()


def _plain(model: nn.Module, state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What JSON can hold of a model and its optimizer's state; the tensors are added to a dictionary."""
    weights = model.state_dict()
    values = {"model": {plain: weights[name] for plain, name in _names(weights).items()}, "optimizer": state}
    about = [about_of(state["state"][key]) for group in state["param_groups"] for key in group["params"]]
    return {key: apart(value, tensors, key) for key, value in values.items()} | {"about": about}


def check_kind(optimizer: Any) -> None:
    """Raise an error for an optimizer of another kind."""
    if not isinstance(optimizer, ReparameterizedOptimizer):
        raise TypeError(
            f"egop.checkpoint is for an egop.ReparameterizedOptimizer, got {type(optimizer).__name__}. With "
            "basis=egop.Reparameterization([]) that does what a plain optimizer does; for others there is "
            "torch.distributed.checkpoint.state_dict."
        )


def _check_names(saved: list[str], names: dict[str, str]) -> None:
    if set(saved) != set(names):
        raise ValueError(
            f"The checkpoint is of another model: only it has {_some(set(saved) - set(names))}, only the model has "
            f"{_some(set(names) - set(saved))}."
        )


def _some(names: set[str]) -> str:
    return f"{sorted(names)[:5]}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_alike(tensors: dict[str, Tensor]) -> None:
    """What processes save together must be of the same names and shapes, or parts would be missing."""
    listed = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items()))
    digests = exchanged(lambda: hashlib.sha256(listed.encode()).hexdigest())
    if len(set(digests)) > 1:
        raise ValueError(
            "The processes have different tensors to save: did all of them take the same steps, with gradients for the "
            "same parameters?"
        )

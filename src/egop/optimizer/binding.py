"""Blocks bound to live parameters: their coordinates, and how the two are kept in step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egop.basis import ChangeOfBasis, Spectrum
from egop.distributed import (
    is_sharded,
    is_sharded_by_rows,
    shard_like,
    sharding_layout,
    take_shard,
    to_full,
    to_local,
    write_shard,
)
from egop.numerics import exact_products


class BoundBlock:
    """One block of an optimizer: the parameters, and the coordinates that the inner optimizer steps.

    Where parameters are sharded (FSDP2), a structure that rotates rows one by one works on the rows that are here; for
    any other the whole tensors are gathered in every step, and for inner optimizers that see whole matrices.
    """

    def __init__(self, change: ChangeOfBasis, originals: Sequence[Tensor], *, whole_matrices: bool = False) -> None:
        self.originals = list(originals)
        self.spectrum: Spectrum | None = None  # of the basis it has, if it is known
        self.sharded = any(is_sharded(original) for original in originals)
        self.rowwise = change.rowwise and change.block.has_outputs_first and not whole_matrices
        self.by_rows = (
            self.sharded
            and self.rowwise
            and all(is_sharded(original) and is_sharded_by_rows(original) for original in originals)
        )
        self.parameters = [to_local(original) if self.by_rows else to_full(original) for original in originals]
        # The precision is that of the parameters as they are now; the model may have been cast since the estimation.
        dtype = functools.reduce(torch.promote_types, [original.dtype for original in originals], torch.float32)
        shapes = tuple(parameter.shape for parameter in self.parameters)
        block = dataclasses.replace(change.block, dtype=dtype, shapes=shapes)
        # Laid out as after loading, so that a resumed training rounds alike.
        tensors = change.to(self.parameters[0].device, dtype).tensors.items()
        self.change = type(change)(block, {key: tensor.contiguous() for key, tensor in tensors}, change.settings)
        self.coordinates = [
            torch.empty(shape, dtype=dtype, device=self.parameters[0].device)
            for shape in self.change.coordinate_shapes()
        ]
        # What a basis that is not complete leaves out of the parameters, and the optimizer must not lose.
        self.rest: list[Tensor] | None = None
        self._seen: list[_Look] = []
        self.take(self.parameters)
        self.note()
        for coordinate in self.coordinates:
            coordinate.requires_grad_()

    @property
    def name(self) -> str:
        """The name of the block."""
        return self.change.block.name

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self.parameters[0].device

    @property
    def is_trained(self) -> bool:
        """Whether it is not frozen: a block that is keeps its basis, too."""
        return any(original.requires_grad or original.grad is not None for original in self.originals)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two blocks must share to be stacked; the same on all processes, also where pieces differ in size."""
        return self.change.signature, tuple(
            (original.shape, original.device, sharding_layout(original)) for original in self.originals
        )

    def stepped(self) -> list[Tensor]:
        """What has gradients for the time of a step: the coordinates, and views or copies of sharded parameters."""
        pairs = zip(self.parameters, self.originals, strict=True)
        return self.coordinates + [parameter for parameter, original in pairs if parameter is not original]

    def pull(self) -> None:
        """Look at sharded parameters and their gradients as they are now."""
        view = to_local if self.by_rows else to_full
        for index, original in enumerate(self.originals):
            self.parameters[index] = view(original)
            self.parameters[index].requires_grad_(original.requires_grad)
            self.parameters[index].grad = None if original.grad is None else view(original.grad)

    def _push(self) -> None:
        """Write what was gathered back to the sharded parameters."""
        for original, parameter in zip(self.originals, self.parameters, strict=True):
            if is_sharded(original) and not self.by_rows:
                write_shard(original, parameter)

    def whole_change(self, tensors: Mapping[str, Tensor] | None = None) -> ChangeOfBasis:
        """Its change of basis for the whole parameters, wherever they are."""
        block = dataclasses.replace(self.change.block, shapes=tuple(original.shape for original in self.originals))
        return type(self.change)(block, self.change.tensors if tensors is None else tensors, self.change.settings)

    def as_sharded(self, place: int, tensor: Tensor) -> Tensor:
        """A tensor of the shape of one of the coordinates as all processes together have it, for a state dict."""
        return shard_like(tensor, self.originals[place]) if self.by_rows and tensor.dim() > 0 else tensor

    @property
    def has_gradient(self) -> bool:
        """Whether any of its parameters got a gradient; without one there is no step."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def gradients(self) -> list[Tensor]:
        """The gradients in the precision of the basis; zero for a parameter of the block that got none."""
        gradients = []
        for name, parameter in zip(self.change.block.parameters, self.parameters, strict=True):
            if parameter.grad is None and not parameter.requires_grad:
                raise ValueError(
                    f"Parameter '{name}' is frozen (requires_grad=False), but a step of its block "
                    f"'{self.change.block.name}' would move it. Estimate the basis with the parameter frozen, or with "
                    "a partition that has it in a block of its own."
                )
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"Parameter '{name}' has a sparse gradient, which cannot be rotated. Use sparse=False in the "
                    "embedding, or estimate the basis with a partition that leaves it out."
                )
            gradients.append(gradient.to(self.change.block.dtype))
        return gradients

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """Make the coordinates, and the rest where there is one, stand for these tensors."""
        exact = [tensor.to(self.change.block.dtype) for tensor in tensors]
        with exact_products():
            self._write(self.change.encode(exact))
        self.keep_rest_of(exact)

    def keep_rest_of(self, tensors: Sequence[Tensor]) -> None:
        """Keep what the basis leaves out of these tensors, which the coordinates stand for, if it is to be kept."""
        if not self.change.complete and self.change.settings["keep_rest"]:
            with exact_products():
                inside = self.change.decode([coordinate.detach() for coordinate in self.coordinates])
            self.rest = [whole - part for whole, part in zip(tensors, inside, strict=True)]

    def whole(self, decoded: Sequence[Tensor]) -> Sequence[Tensor]:
        """Decoded tensors together with what the basis leaves out."""
        if self.rest is None:
            return decoded
        return [part + rest for part, rest in zip(decoded, self.rest, strict=True)]

    def drop_rest(self) -> None:
        """Write to the parameters what the coordinates stand for, where the rest is not to be kept."""
        if not self.change.complete and self.rest is None:
            self.accept(self.change.decode([coordinate.detach() for coordinate in self.coordinates]))

    @property
    def was_written(self) -> bool:
        """Whether someone else may have written to a parameter."""
        places = zip(self.parameters, self.originals, self._seen, strict=True)
        return any(not _as_seen(parameter, original, seen) for parameter, original, seen in places)

    def follow(self, decoded: Sequence[Tensor]) -> None:
        """If a parameter is not what the coordinates stand for, take its new value into them.

        Where values are not looked at, written may still mean unchanged. The coordinates hold more than the parameters
        do (rounding, and the bits below half precision): they are kept when they still stand for them.

        Args:
            decoded: what the coordinates decode to, by the same product as in a step, since its rounding counts here.
        """
        if any(parameter.device != value.device for parameter, value in zip(self.parameters, decoded, strict=True)):
            return  # moved elsewhere: it is bound anew at the next step
        pairs = zip(self.parameters, self.whole(decoded), self._seen, strict=True)
        if not all((_rounds_to if seen == _LOADED else _is)(value, parameter) for parameter, value, seen in pairs):
            self.take(self.parameters)
        self.note()

    @torch.no_grad()
    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Write decoded tensors into the parameters."""
        for parameter, tensor in zip(self.parameters, self.whole(tensors), strict=True):
            parameter.copy_(tensor)
        self.wrote()

    def wrote(self) -> None:
        """The parameters have been written from the coordinates."""
        if self.sharded:
            self._push()
        self.note()

    def restore(
        self, coordinates: Sequence[Tensor], rest: Sequence[Tensor] | None, stand_for: Sequence[str] | None
    ) -> None:
        """Take saved coordinates (and rest), which stand for the parameters with these digests, if they are known."""
        for place, (coordinate, saved) in enumerate(zip(self.coordinates, coordinates, strict=True)):
            here = take_shard(saved, self.originals[place]) if self.by_rows else to_full(saved)
            if coordinate.shape != here.shape:
                raise ValueError(
                    f"Block '{self.change.block.name}' has coordinates of shape {tuple(saved.shape)} in the state dict,"
                    f" but {tuple(coordinate.shape)} here."
                )
            with torch.no_grad():
                coordinate.copy_(here)
        if self.rest is not None and rest is not None:
            for tensor, saved in zip(self.rest, rest, strict=True):
                if tensor.shape != saved.shape:
                    raise ValueError(
                        f"Block '{self.change.block.name}' has a rest of shape {tuple(saved.shape)} in the state dict, "
                        f"but {tuple(tensor.shape)} here."
                    )
            self.rest = [saved.to(tensor, copy=True) for tensor, saved in zip(self.rest, rest, strict=True)]
        digests = stand_for or [UNKNOWN] * len(self.parameters)
        self._seen = [_LOADED if digest == UNKNOWN else digest for digest in digests]

    def mark_saved(self) -> None:
        """Compare the coordinates with the parameters at the next step, as after loading: a resumed run does so too."""
        self._seen = [_LOADED] * len(self.parameters)

    def distrust(self) -> None:
        """The coordinates may have changed without the parameters: the parameters are what holds."""
        self._seen = [UNKNOWN] * len(self.parameters)

    def stand_for(self) -> list[str]:
        """Digests of the parameters that the coordinates stand for: with them the coordinates can be restored."""
        places = zip(self.parameters, self.originals, self._seen, strict=True)
        return [_digest_seen(parameter, original, seen) for parameter, original, seen in places]

    def __getstate__(self) -> dict[str, Any]:
        """For copies: what was noted is not true of their parameters, and views would take the whole stack along."""
        copies = {name: tensor.clone() for name, tensor in self.change.tensors.items()}
        return self.__dict__ | {"_seen": self.stand_for(), "change": self.change.replaced(copies)}

    def _write(self, coordinates: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for coordinate, new in zip(self.coordinates, coordinates, strict=True):
                coordinate.copy_(new)

    def note(self) -> None:
        """The coordinates stand for the parameters as they are now."""
        self._seen = [_look(*pair) for pair in zip(self.parameters, self.originals, strict=True)]


def map_to_blocks(blocks: Iterable[BoundBlock]) -> dict[int, BoundBlock]:
    """Map each parameter that is in a block, by its ``id``, to the block."""
    return {id(original): block for block in blocks for original in block.originals}


# What a parameter was like: its values, torch's count of writes to it and its place, or a digest of its values.
_Look = Tensor | tuple[int, int] | str
UNKNOWN = "0" * 32  # the digest of nothing
_LOADED = "f" * 32  # likewise; of coordinates that were loaded, which may have been decoded in other pieces


def _look(parameter: Tensor, original: Tensor) -> _Look:
    """What would differ if someone else had written to the parameter, or to the sharded one that it is taken from.

    ``_version`` is torch's counter of in-place writes (a private name; a test notices when it changes). It misses
    writes through ``.data``; on the CPU a copy of the values costs little and shows those too.
    """
    return parameter.detach().clone() if parameter.device.type == "cpu" else _mark(original)


def _mark(original: Tensor) -> tuple[int, int]:
    return original._version, to_local(original).data_ptr()


def _as_seen(parameter: Tensor, original: Tensor, seen: _Look) -> bool:
    if isinstance(seen, tuple):
        return _mark(original) == seen
    if isinstance(seen, Tensor):
        return parameter.dtype == seen.dtype and torch.equal(parameter, seen)
    return _digest(parameter) == seen


def _digest_seen(parameter: Tensor, original: Tensor, seen: _Look) -> str:
    if isinstance(seen, str):
        return seen
    if isinstance(seen, Tensor):
        return _digest(seen)
    return _digest(parameter) if _as_seen(parameter, original, seen) else UNKNOWN


def _is(value: Tensor, parameter: Tensor) -> bool:
    """Whether a parameter is just what was decoded."""
    return torch.equal(parameter, value.to(parameter.dtype))


def _rounds_to(value: Tensor, parameter: Tensor) -> bool:
    """Whether a parameter of half precision is what was decoded, up to the rounding of another product.

    Its coordinates are master weights, with bits that the parameter does not have. A parameter of single precision has
    as many: then it counts itself.
    """
    epsilon = torch.finfo(parameter.dtype).eps
    if epsilon <= torch.finfo(torch.float32).eps:
        return _is(value, parameter)
    exact = parameter.to(value.dtype)
    return bool(((value - exact).abs() <= 0.51 * epsilon * torch.maximum(value.abs(), exact.abs())).all())


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=16).hexdigest()

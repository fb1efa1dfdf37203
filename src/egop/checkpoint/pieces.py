"""Which part of a tensor a process has, when tensors are sharded over processes as ``DTensor``."""

from __future__ import annotations

from typing import Any, NamedTuple

from egop.distributed import is_sharded, rank


class Region(NamedTuple):
    """A part of a tensor: where it begins, and how large it is, along every dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def common(self, other: Region) -> Region | None:
        """What it has in common with another part of the same tensor."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = tuple(map(min, self.end, other.end))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in shape) else Region(starts, shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends along every dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Where it is in another part that has all of it."""
        pairs = zip(self.offset, self.end, outer.offset, strict=True)
        return tuple(slice(start - first, end - first) for start, end, first in pairs)


def everything(tensor: Any) -> Region:
    """All of a tensor."""
    return Region((0,) * tensor.dim(), tuple(tensor.shape))


def is_plainly_sharded(tensor: Any) -> bool:
    """Whether :func:`region_here` knows what a process has of it: a plain tensor, or one that is cut by torch's rule.

    Others (sums that are still to be made, shards of shards for tensor parallelism) have to be gathered.
    """
    if not is_sharded(tensor):
        return True
    from torch.distributed.tensor import Replicate, Shard

    return all(type(place) in (Replicate, Shard) for place in tensor.placements)


def region_here(tensor: Any) -> Region | None:
    """What this process has of a plainly sharded tensor; None if nothing.

    Along each dimension of the mesh torch cuts what the dimensions before have left into pieces of equal size, as
    ``torch.chunk`` does: the last ones may be smaller, or empty.
    """
    if not is_sharded(tensor):
        return everything(tensor)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this process is not in the mesh
        return None
    offset, shape = [0] * tensor.dim(), list(tensor.shape)
    for place, parts, index in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if place.is_shard():
            axis = place.dim % tensor.dim()
            size = -(-shape[axis] // parts)
            start = min(index * size, shape[axis])
            offset[axis] += start
            shape[axis] = min(size, shape[axis] - start)
    return None if 0 in shape else Region(tuple(offset), tuple(shape))


def is_first_with_it(tensor: Any) -> bool:
    """Whether this is the first process that has what it has of a tensor: the one that writes it."""
    if not is_sharded(tensor):
        return rank() == 0
    from torch.distributed.tensor import Shard

    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    places = zip(tensor.placements, coordinate, strict=True)
    gathered = not is_plainly_sharded(tensor)  # then all processes have all of it
    return all(index == 0 for place, index in places if gathered or type(place) is not Shard)

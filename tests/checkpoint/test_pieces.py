"""Tensors that are spread over processes in any way are written once, and read by any number of others."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import zeros as spread_zeros
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from egop.checkpoint import files
from egop.checkpoint.index import DTYPES, from_text
from egop.checkpoint.pieces import everything, is_plainly_sharded, region_here
from processes import run

SHAPES = [(7, 5), (3,), (0, 3), ()]
SAVE = "1-00000000"


def values(shape, dtype=torch.float64):
    count = math.prod(shape)
    if dtype.is_complex:
        return torch.complex(values(shape, torch.float64), -values(shape, torch.float64)).to(dtype)
    return torch.arange(1, count + 1).reshape(shape).to(dtype)


def placements(shape, dimensions):
    """All plain ways to spread a tensor over a mesh."""
    ways = [Replicate(), *map(Shard, range(len(shape)))]
    return list(itertools.product(ways, repeat=dimensions))


def meshes(world):
    found = {"line": init_device_mesh("cpu", (world,))}
    if world == 4:
        found["square"] = init_device_mesh("cpu", (2, 2))
    return found


def everywhere(world):
    """All shapes spread in all plain ways, by name."""
    return {
        f"{shape} {kind} {number}": distribute_tensor(values(shape), mesh, way)
        for kind, mesh in meshes(world).items()
        for shape in SHAPES
        for number, way in enumerate(placements(shape, mesh.ndim))
    }


def tensor_parallel():
    """Weights that FSDP2 cuts after tensor parallelism has: shards of shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return dict(fully_shard(model, mesh=mesh["data"]).state_dict()), expected


def on_four(rank, world, folder):
    tensors = everywhere(world)
    for name, tensor in tensors.items():  # what torch gives a process is what we say that it has
        region, here = region_here(tensor), tensor.to_local()
        if region is None:
            assert here.numel() == 0, name
        else:
            whole = values(tensor.shape)
            assert torch.equal(here, whole[region.within(everything(whole))]), name
    cut, expected = tensor_parallel()
    assert not all(is_plainly_sharded(tensor) for tensor in cut.values())
    tensors |= cut
    mesh = init_device_mesh("cpu", (world,))
    tensors["sum"] = DTensor.from_local(torch.tensor([rank, 1.0]), mesh, [Partial()])
    tensors["some"] = distribute_tensor(values((5, 2)), DeviceMesh("cpu", [1, 2]), [Shard(0)])
    dtypes = {name: values((3, 2), dtype) for name, dtype in DTYPES.items()}
    dtypes |= {f"{name} alone": values((), dtype) for name, dtype in DTYPES.items()}
    tensors |= dtypes | {
        "columns": values((3, 2)).mT,
        "view": values((6,))[::2],
        "conj": values((3,), torch.cfloat).conj(),
    }
    if rank == 0:
        tensors = files.with_text(tensors | {"own": values((2,))}, {"a": [1, None]})
        Path(folder).mkdir()
    dist.barrier()
    files.write(Path(folder), SAVE, tensors)
    saved = files.Saved(Path(folder))
    places = {name: saved.place(name, lambda shape, dtype, own=own: torch.zeros_like(own)) for name, own in cut.items()}
    saved.read()
    assert all(torch.equal(place.full_tensor(), expected[name]) for name, place in places.items())
    compare(folder, world)
    broken = DTensor.from_local(torch.zeros(rank + 1), mesh, [Shard(0)], run_check=False, shape=(10,), stride=(1,))
    with pytest.raises(ValueError, match="not sharded as torch shards tensors"):
        files.write(Path(folder), "2-00000000", {"broken": broken})
    with pytest.raises(ValueError, match="what only one of them has must be plain"):
        files.write(Path(folder), "3-00000000", {"sum": tensors["sum"]} if rank == 0 else {})


def compare(folder, world):
    """Read every tensor into every way of being spread here."""
    saved = files.Saved(Path(folder))
    assert saved.content == {"a": [1, None]}
    source = [name for name in from_text((Path(folder) / "index.json").read_bytes()).entries if ") " in name]
    for mesh in meshes(world).values() if world > 1 else [None]:
        for way in itertools.count():
            places = {}
            for name in source:
                ways = placements(saved.shape(name), mesh.ndim) if mesh is not None else [()]
                if way < len(ways):
                    places[name] = saved.place(name, lambda shape, dtype: room(shape, mesh, ways[way]))  # noqa: B023
            if not places:
                break
            saved.read()
            for name, place in places.items():
                whole, region = values(place.shape), region_here(place)
                here = place if mesh is None else place.to_local()
                expected = whole[region.within(everything(whole))] if region else whole[:0]
                assert torch.equal(here, expected) or here.numel() == expected.numel() == 0, name


def room(shape, mesh, way):
    if mesh is None:
        return torch.zeros(shape, dtype=torch.float64)
    return spread_zeros(shape, dtype=torch.float64, device_mesh=mesh, placements=way)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces") / "here"
    run(on_four, 4, str(folder))
    return folder


def test_what_four_have_written_in_all_ways_one_reads(written):
    compare(written, 1)


def test_every_element_is_written_once(written):
    index = json.loads((written / "index.json").read_text())
    stored = 0
    for path in sorted(written.glob("part-*")):
        with safe_open(path, framework="pt") as file:
            stored += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    complex_too = {"complex64": 2, "complex128": 2}
    assert stored == sum(
        math.prod(each["shape"]) * complex_too.get(each["dtype"], 1) for each in index["tensors"].values()
    )


def test_all_kinds_of_numbers_come_back_bit_for_bit(written):
    saved = files.Saved(written)
    places = {name: saved.place(name, torch.empty) for kind in DTYPES for name in (kind, f"{kind} alone")}
    others = {name: saved.place(name, torch.empty) for name in ("columns", "view", "conj", "own", "sum", "some")}
    saved.read()
    for name, place in places.items():
        expected = values(() if name.endswith("alone") else (3, 2), DTYPES[name.partition(" ")[0]])
        assert place.dtype == expected.dtype
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (place, expected)]
        assert torch.equal(*bits), name
    assert torch.equal(others["columns"], values((3, 2)).mT)
    assert others["view"].tolist() == [1, 3, 5]
    assert torch.equal(others["conj"], values((3,), torch.cfloat).conj())
    assert others["own"].tolist() == [1, 2]
    assert others["sum"].tolist() == [6, 4]
    assert torch.equal(others["some"], values((5, 2)))


def test_places_may_have_any_strides(tmp_path):
    image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    files.write(tmp_path, SAVE, files.with_text({"image": image.to(memory_format=torch.channels_last)}, None))
    for layout in (torch.channels_last, torch.contiguous_format):
        saved = files.Saved(tmp_path)
        place = saved.place("image", lambda shape, dtype: torch.zeros(shape).to(memory_format=layout))  # noqa: B023
        saved.read()
        assert place.is_contiguous(memory_format=layout)
        assert torch.equal(place, image)


def test_a_tensor_of_a_kind_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"cannot hold tensors of torch.float8_e4m3fnuz; it can of float64, float32"):
        files.write(tmp_path, SAVE, {"odd": torch.empty(2, dtype=torch.float8_e4m3fnuz)})

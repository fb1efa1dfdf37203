"""Time and memory to a basis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import egop
from egop_lab.bench import networks
from egop_lab.bench.machine import Row, Setting, release
from egop_lab.bench.networks import Network
from egop_lab.bench.setups import MEMORY
from egop_lab.bench.steps import compute_gradients
from egop_lab.bench.timing import describe_error, time_call
from egop_lab.gpu import synchronize


def estimate(network: Network, structure: egop.Structure, samples: int | None, device: torch.device) -> Row:
    """Estimate a basis around a network's start; return its samples, time and memory (the peak on a GPU only)."""
    objective = egop.Objective(network.make(device), network.loss, network.batches(device, 13))
    bases: list[egop.Basis] = []

    def work() -> None:
        rho = egop.Recentered(0.01)
        options = {"partition": "parameter", "samples": samples, "memory": MEMORY, "progress": False}
        bases.append(egop.estimate(objective, rho=rho, structure=structure, **options))  # type: ignore[arg-type]

    synchronize(device)
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if gpu else 0
    seconds = time_call(work, device)
    changes = list(bases[0].values())
    return {
        "samples": samples or max(structure.samples(change.block) for change in changes),
        "seconds": seconds,
        "basis bytes": sum(change.nbytes for change in changes),
        "peak bytes": torch.cuda.max_memory_allocated(device) - before if gpu else None,
    }


def run(setting: Setting) -> Iterator[Row]:
    """Run the basis part of the benchmark."""
    every = [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=64), egop.Reduced(rank=64)]
    lean = [egop.Shared(), egop.Kronecker()]
    tiny = [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=2), egop.Reduced(rank=2)]
    cases: list[tuple[Network, list[egop.Structure], int | None]] = setting.pick(
        smoke=[(networks.perceptron((6, 4, 3), 4), tiny, 8)],
        cpu=[
            (networks.digits(), every, None),
            (networks.perceptron((784, 100, 10), 128), [*lean, egop.Auxiliary(rank=64)], None),
            (networks.gpt(2, 256, 8, 64), lean, None),
        ],
        gpu=[
            (networks.digits(), every, None),
            (networks.perceptron((784, 100, 10), 128), [*lean, egop.Auxiliary(rank=64)], None),
            (networks.gpt(6, 384, 16), lean, None),
            (networks.resnet(128, 112), [egop.Shared()], 16),
        ],
    )
    with contextlib.suppress(Exception):  # warm up decompositions; a failure will show again below
        estimate(networks.perceptron((6, 4, 3), 4), egop.Shared(), 8, setting.device)
    for network, structures, samples in cases:
        with contextlib.suppress(Exception):  # the same for the network
            compute_gradients(network, network.make(setting.device), network.batches(setting.device, 1))
        for structure in structures:
            rank = getattr(structure, "rank", None)
            name = type(structure).__name__ + ("" if rank is None else f"({rank})")
            row: Row = {"network": network.name, "structure": name}
            try:
                row |= estimate(network, structure, samples, setting.device)
            except Exception as error:  # go on with the other rows
                row["failed"] = describe_error(error)
            yield row
            release(setting.device)

"""Time and memory to a basis, and what share of the time is sampling, accumulation and decomposition."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import egop
from egop.basis import Accumulator, Block
from egop_lab.bench import networks
from egop_lab.bench.machine import Row, Setting, release
from egop_lab.bench.networks import Network
from egop_lab.bench.setups import MEMORY
from egop_lab.bench.steps import compute_gradients
from egop_lab.bench.timing import PeakMemory, describe_error, time_call


@dataclass
class Shares:
    """Seconds spent in the two halves of an accumulator; the rest of an estimate is sampling."""

    accumulation: float = 0.0
    decomposition: float = 0.0


@dataclass(frozen=True)
class Timed(egop.Structure):
    """A structure that times its accumulators; each timing waits for the device."""

    inner: egop.Structure
    device: torch.device
    shares: Shares = field(default_factory=Shares, compare=False)

    @property
    def change_type(self) -> type[egop.ChangeOfBasis]:  # type: ignore[override]
        """Class of the inner structure's changes of basis."""
        return self.inner.change_type

    @property
    def joint(self) -> bool:  # type: ignore[override]
        """Whether the inner structure treats several tensors as one."""
        return self.inner.joint

    def samples(self, block: Block) -> int:
        """Return the number of gradients that the inner structure asks for."""
        return self.inner.samples(block)

    def settings(self, block: Block) -> dict[str, Any]:
        """Return the settings of the inner structure's changes."""
        return self.inner.settings(block)

    def check(self, block: Block) -> None:
        """Check that the inner structure supports the tensors."""
        self.inner.check(block)

    def accumulator(self, block: Block) -> Accumulator:
        """Create an empty accumulator that is timed."""
        return _TimedAccumulator(self.inner.accumulator(block), self)


class _TimedAccumulator(Accumulator):
    def __init__(self, inner: Accumulator, timed: Timed) -> None:
        self.inner, self.timed = inner, timed

    def add(self, gradients: Sequence[Tensor]) -> None:
        self.timed.shares.accumulation += time_call(lambda: self.inner.add(gradients), self.timed.device)

    def merge(self, other: Accumulator) -> None:
        assert isinstance(other, _TimedAccumulator)
        self.inner.merge(other.inner)

    def finish(self) -> tuple[egop.Spectrum | None, egop.ChangeOfBasis]:
        results: list[tuple[egop.Spectrum | None, egop.ChangeOfBasis]] = []
        self.timed.shares.decomposition += time_call(lambda: results.append(self.inner.finish()), self.timed.device)
        return results[0]


def estimate(
    network: Network, structure: egop.Structure, samples: int | None, device: torch.device
) -> tuple[egop.Basis, Row]:
    """Estimate a basis around a network's start; return it with its time and memory."""
    objective = egop.Objective(network.make(device), network.loss, network.batches(device, 13))
    timed = Timed(structure, device)
    bases: list[egop.Basis] = []

    def work() -> None:
        options: dict[str, Any] = {"rho": egop.Recentered(0.01), "samples": samples, "memory": MEMORY}
        bases.append(egop.estimate(objective, structure=timed, partition="parameter", progress=False, **options))

    with PeakMemory(device) as peak:
        seconds = time_call(work, device)
    shares = timed.shares
    return bases[0], {
        "seconds": seconds,
        "sampling": (seconds - shares.accumulation - shares.decomposition) / seconds,
        "accumulation": shares.accumulation / seconds,
        "decomposition": shares.decomposition / seconds,
        "peak bytes": peak.bytes,
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
            (networks.convolutions(64, 16), lean, None),
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
            row: Row = {"network": network.name, "structure": _name(structure)}
            try:
                basis, took = estimate(network, structure, samples, setting.device)
            except Exception as error:  # go on with the other rows
                yield row | {"failed": describe_error(error)}
                continue
            drawn = samples or max(structure.samples(change.block) for change in basis.values())
            held = sum(change.nbytes for change in basis.values())
            yield row | {"samples": drawn, "basis bytes": held} | took
            del basis
            release(setting.device)


def _name(structure: egop.Structure) -> str:
    rank = getattr(structure, "rank", None)
    return type(structure).__name__ + ("" if rank is None else f"({rank})")

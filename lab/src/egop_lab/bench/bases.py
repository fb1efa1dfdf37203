"""Time and memory to a basis, on random batches: what the networks learn does not matter here."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import egop
from egop_lab.gpu import compute_outputs, synchronize
from egop_lab.models import small
from egop_lab.models.gpt import GPT
from egop_lab.models.residual import ResidualNetwork

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Network:
    """A network and the shape of its batches.

    One that reads tokens has an output for each of them; a large one computes in bfloat16 on a GPU.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    classes: int = 10
    tokens: bool = False
    large: bool = False

    def batches(self, device: torch.device, count: int) -> list[Batch]:
        """Draw random batches on a device, always the same ones."""
        generator = torch.Generator().manual_seed(1)
        batches = []
        for _ in range(count):
            if self.tokens:
                text = torch.randint(self.classes, (self.inputs[0], self.inputs[1] + 1), generator=generator)
                inputs, targets = text[:, :-1], text[:, 1:]
            else:
                inputs = torch.randn(self.inputs, generator=generator)
                targets = torch.randint(self.classes, self.inputs[:1], generator=generator)
            batches.append((inputs.to(device), targets.to(device)))
        return batches

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy of a batch."""
        inputs, targets = batch
        outputs = compute_outputs(model, inputs) if self.large else model(inputs)
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def perceptron(*widths: int, batch: int) -> Network:
    """Return linear layers with ReLU between them."""
    name = f"MLP {'-'.join(map(str, widths))}"
    return Network(name, lambda: small.perceptron(*widths), (batch, widths[0]), widths[-1])


def gpt(layers: int, width: int, batch: int, context: int = 256) -> Network:
    """Return a GPT on bytes, with heads of 64."""
    sizes = {"layers": layers, "width": width, "heads": max(1, width // 64), "context": context}
    return Network(f"GPT {layers}x{width}", lambda: GPT(**sizes), (batch, context), 256, tokens=True, large=True)


def measure_basis(
    network: Network, structure: egop.Structure, samples: int | None, device: torch.device
) -> dict[str, Any]:
    """Estimate a basis around a network's start; return its samples, time and memory (the peak on a GPU only)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network.build().to(device)
    objective = egop.Objective(model, network.loss, network.batches(device, 13))
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if gpu else 0
    synchronize(device)
    began = time.perf_counter()
    rho = egop.Recentered(0.01)
    options: dict[str, Any] = {"partition": "parameter", "samples": samples, "memory": "64GiB", "progress": False}
    basis = egop.estimate(objective, rho=rho, structure=structure, **options)
    synchronize(device)
    seconds = time.perf_counter() - began
    return {
        "samples": samples or max(structure.samples(change.block) for change in basis.values()),
        "seconds": seconds,
        "basis bytes": sum(change.nbytes for change in basis.values()),
        "peak bytes": torch.cuda.max_memory_allocated(device) - before if gpu else None,
    }


def run(device: torch.device, smoke: bool, rounds: int | None) -> Iterator[dict[str, Any]]:
    """Measure several structures on several networks; a row that fails says why, and the others go on."""
    tiny = perceptron(6, 4, 3, batch=4)
    with contextlib.suppress(Exception):  # warm up decompositions; a failure will show again below
        measure_basis(tiny, egop.Shared(), 8, device)
    for network, structures, samples in [(tiny, _list_structures(2), 8)] if smoke else _list_cases(device):
        if not smoke:
            with contextlib.suppress(Exception):  # the same for the network
                measure_basis(network, egop.Identity(), samples, device)
        for structure in structures:
            rank = getattr(structure, "rank", None)
            row: dict[str, Any] = {"network": network.name}
            row["structure"] = type(structure).__name__ + ("" if rank is None else f"({rank})")
            try:
                row |= measure_basis(network, structure, samples, device)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"
            yield row
            gc.collect()
            torch.cuda.empty_cache()


def _list_structures(rank: int) -> list[egop.Structure]:
    return [egop.Full(), egop.Shared(), egop.Kronecker(), egop.Auxiliary(rank=rank), egop.Reduced(rank=rank)]


def _list_cases(device: torch.device) -> list[tuple[Network, Sequence[egop.Structure], int | None]]:
    lean = [egop.Shared(), egop.Kronecker()]
    cases: list[tuple[Network, Sequence[egop.Structure], int | None]] = [
        (Network("digits MLP", small.digits_network, (300, 64)), _list_structures(64), None),
        (perceptron(784, 100, 10, batch=128), [*lean, egop.Auxiliary(rank=64)], None),
    ]
    if device.type != "cuda":
        return [*cases, (gpt(2, 256, 8, 64), lean, None)]
    resnet = Network("ResNet-34", lambda: ResidualNetwork((3, 4, 6, 3), 64, 10), (128, 3, 112, 112), large=True)
    return [*cases, (gpt(6, 384, 16), lean, None), (resnet, [egop.Shared()], 16)]

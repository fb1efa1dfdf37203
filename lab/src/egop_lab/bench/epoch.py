"""A whole epoch of ResNet-34: AdamW, a fixed shared basis, and one that is estimated again every epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import egop
from egop_lab.bench import networks
from egop_lab.bench.machine import Setting, release
from egop_lab.bench.methods import ADAMW, adamw, reparameterized
from egop_lab.bench.networks import Batch, Network
from egop_lab.bench.timing import interleaved, middle, spread, taken
from egop_lab.training import residual

Row = dict[str, Any]

FIXED, RENEWED = "Shared, fixed", "Shared, each epoch"
EAGER, GRAPH = "eager", "CUDA graph"


class _Epoch:
    """A network of its own that one method trains, an epoch at a time.

    Args:
        network: the network.
        batches: what it is trained on.
        steps: of an epoch.
        samples: gradients for a new basis; by default what the experiment takes.
        form: how forward and backward run.
        name: of the method.
    """

    def __init__(
        self, network: Network, batches: Sequence[Batch], steps: int, samples: int | None, form: str, name: str
    ) -> None:
        self.network, self.batches, self.steps, self.samples = network, batches, steps, samples
        self.device = batches[0][0].device
        self.model = network.make(self.device)
        self.outputs = _graphed(network, self.model, batches[0][0]) if form == GRAPH else None
        self.optimizer = self._optimizer(name)
        self._train(3)
        if isinstance(self.optimizer, egop.ReparameterizedOptimizer) and self.optimizer.refresher is not None:
            self.optimizer.renew_basis()  # the first one loads what it needs

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        if name == ADAMW:
            return adamw(self.model)
        if name == FIXED:
            return reparameterized(self.model, fixed=egop.Shared())
        objective = egop.Objective(self.model, self.network.loss, self.batches)
        start = residual.Start(self.model, objective, 0.0, 0.0, self.steps, seed=0)
        refresh = egop.Every(self.steps, objective, samples=self.samples or start.passes)
        return reparameterized(self.model, fixed=egop.Shared(), refresh=refresh)

    def __call__(self) -> float:
        """The seconds of an epoch."""
        return taken(lambda: self._train(self.steps), self.device)

    def _train(self, steps: int) -> None:
        for index in range(steps):
            inputs, targets = self.batches[index % len(self.batches)]
            self.model.zero_grad()
            outputs = self.network.outputs(self.model, inputs) if self.outputs is None else self.outputs(inputs)
            networks.loss_of(outputs, targets).backward()
            self.optimizer.step()


class _Outputs(nn.Module):
    def __init__(self, network: Network, model: nn.Module) -> None:
        super().__init__()
        self.network, self.model = network, model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network.outputs(self.model, inputs, cache_enabled=False)  # casts must be part of the graph


def _graphed(network: Network, model: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """Forward and backward as a CUDA graph: the fastest baseline, for which the same basis is a larger share."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # newer than torch 2.9
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # a graph has its own stream
    outputs = _Outputs(network, model)
    torch.cuda.make_graphed_callables(outputs, (inputs.clone(),))
    return outputs


def run(setting: Setting) -> Iterator[Row]:
    """The epoch part of the benchmark: 74 steps, as many as Imagenette has batches of 128."""
    if not setting.gpu and not setting.smoke:
        yield {"note": "A whole epoch of ResNet-34 is measured on a GPU only."}
        return
    network = networks.resnet(2, 32, width=4, depths=(1, 1)) if setting.smoke else networks.resnet(128, 112)
    steps, samples = (3, 2) if setting.smoke else (74, None)
    batches = network.batches(setting.device, 16)
    for form in [EAGER, GRAPH] if setting.gpu else [EAGER]:
        names = (ADAMW, FIXED, RENEWED)
        made, unready = interleaved(
            {name: functools.partial(_Epoch, network, batches, steps, samples, form, name) for name in names}, rounds=1
        )
        found, failed = interleaved({name: epoch for name, (epoch,) in made.items()}, setting.turns(7), limit=12)
        base = middle(found[ADAMW]) if ADAMW in found else None
        for name, seconds in found.items():
            row: Row = {"network": network.name, "form": form, "method": name, "steps": steps}
            row |= {"epoch": middle(seconds), "epoch spread": spread(seconds)}
            yield row | ({} if base is None else {"epoch over AdamW": row["epoch"] / base})
        for name, problem in (unready | failed).items():
            yield {"network": network.name, "form": form, "method": name, "failed": problem}
        del made
        release(setting.device)

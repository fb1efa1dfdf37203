"""A whole epoch of ResNet-34: AdamW, a fixed shared basis, and one that is estimated again every epoch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from statistics import median

from torch import Tensor, nn

import egop
from egop_lab.bench import networks
from egop_lab.bench.machine import Row, Setting, release
from egop_lab.bench.networks import Batch, Network
from egop_lab.bench.setups import make_setup
from egop_lab.bench.timing import interleave, spread, time_call
from egop_lab.methods import EPOCH, get_label, get_methods
from egop_lab.training.classifiers import count_samples
from egop_lab.training.timed_runs import capture_graphs

ADAMW, FIXED, EACH_EPOCH = (get_label(EPOCH, name) for name in ("adamw", "shared-fixed", "shared-renewed"))
EAGER, GRAPH = "eager", "CUDA graph"


class _Epoch:
    """A network that one method trains, one epoch at a time."""

    def __init__(
        self, network: Network, batches: Sequence[Batch], steps: int, samples: int | None, form: str, name: str
    ) -> None:
        self.network, self.batches, self.steps = network, batches, steps
        self.device = batches[0][0].device
        self.model = network.make(self.device)
        self.outputs = capture_graphs(_Outputs(network, self.model), batches[0][0].clone()) if form == GRAPH else None
        options = {"period": steps, "samples": samples or count_samples(self.model)}
        self.optimizer = get_methods(EPOCH)[name].make(make_setup(self.model, network, batches, **options))
        self._train(3)
        if isinstance(self.optimizer, egop.ReparameterizedOptimizer) and self.optimizer.refresher is not None:
            self.optimizer.renew_basis()  # the first refresh loads kernels

    def __call__(self) -> float:
        """Train for an epoch; return the seconds it took."""
        return time_call(lambda: self._train(self.steps), self.device)

    def _train(self, steps: int) -> None:
        for index in range(steps):
            inputs, targets = self.batches[index % len(self.batches)]
            self.model.zero_grad()
            outputs = self.network.outputs(self.model, inputs) if self.outputs is None else self.outputs(inputs)
            networks.compute_loss(outputs, targets).backward()
            self.optimizer.step()


class _Outputs(nn.Module):
    """The network's outputs, recorded as a CUDA graph: the fastest baseline, of which a basis is a larger share."""

    def __init__(self, network: Network, model: nn.Module) -> None:
        super().__init__()
        self.network, self.model = network, model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network.outputs(self.model, inputs, cache_enabled=False)  # casts must be part of the graph


def run(setting: Setting) -> Iterator[Row]:
    """Run the epoch part of the benchmark: 74 steps, the number of batches of 128 in Imagenette."""
    if not setting.gpu and not setting.smoke:
        yield {"note": "A whole epoch of ResNet-34 is measured on a GPU only."}
        return
    network = networks.resnet(2, 32, width=4, depths=(1, 1)) if setting.smoke else networks.resnet(128, 112)
    steps, samples = (3, 2) if setting.smoke else (74, None)
    batches = network.batches(setting.device, 16)
    for form in [EAGER, GRAPH] if setting.gpu else [EAGER]:
        epochs, unready = interleave(
            {
                name: functools.partial(_Epoch, network, batches, steps, samples, form, name)
                for name in get_methods(EPOCH)
            },
            rounds=1,
        )
        times, failed = interleave({name: epoch for name, (epoch,) in epochs.items()}, setting.turns(7), limit=12)
        base = median(times[ADAMW]) if ADAMW in times else None
        for name, seconds in times.items():
            row: Row = {"network": network.name, "form": form, "method": name, "steps": steps}
            row |= {"epoch": median(seconds), "epoch spread": spread(seconds)}
            yield row | ({} if base is None else {"epoch over AdamW": row["epoch"] / base})
        for name, problem in (unready | failed).items():
            yield {"network": network.name, "form": form, "method": name, "failed": problem}
        del epochs
        release(setting.device)

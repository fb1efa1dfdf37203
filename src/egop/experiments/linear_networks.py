"""Linear networks of three layers: all parameters in one basis, a basis a layer, the first layer alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import egop
from egop.experiments import batched
from egop.experiments.data import Batches
from egop.experiments.models import xavier_
from egop.experiments.sweeps import EGOP

WIDTHS = (10, 50, 30, 10)  # 10-30-50-10 in the paper's appendix; the number of parameters is the same
NAMES = ("0.weight", "1.weight", "2.weight")
BLOCK = "EGOP, block"
FIRST = "EGOP, first layer"


class LinearProblem(batched.Problem):
    """Trials of ‖W₃W₂W₁A − Y‖²/n with Y = M*A, each with its own A, M*, start and order of the batches."""

    def __init__(self, seeds: Sequence[int], samples: int, batch: int, device: torch.device) -> None:
        self.seeds, self.batch, self.device = list(seeds), batch, device
        made = [_data(seed, samples) for seed in self.seeds]
        inputs = torch.stack([a for a, _ in made])
        self.wanted = torch.stack([m for _, m in made]).float().to(device)
        self.train = inputs[:, : samples // 2].float().to(device)
        self._roots = {
            "loss": _root(inputs[:, : samples // 2]).float().to(device),
            "validation loss": _root(inputs[:, samples // 2 : samples * 7 // 10]).float().to(device),
        }
        self._bases: dict[str, list[egop.Reparameterization]] = {}
        self._orders: dict[int, Tensor] = {}

    @property
    def steps_per_epoch(self):
        return self.train.shape[1] // self.batch

    def network(self, seed):
        layers = [nn.Linear(i, o, bias=False) for i, o in zip(WIDTHS, WIDTHS[1:])]
        return xavier_(nn.Sequential(*layers), torch.Generator().manual_seed(seed)).to(self.device)

    def start(self):
        networks = [dict(self.network(seed).named_parameters()) for seed in self.seeds]
        return {name: torch.stack([n[name].detach() for n in networks]) for name in NAMES}

    def losses(self, point, step):
        epoch, batch = divmod(step, self.steps_per_epoch)
        rows = self._order(epoch)[:, batch * self.batch : (batch + 1) * self.batch]
        inputs = self.train.gather(1, rows[..., None].expand(-1, -1, WIDTHS[0]))
        return _loss(self._error(point), inputs[:, None]) / self.batch

    def _error(self, point):
        first, second, third = (point[name] for name in NAMES)
        return third @ (second @ first) - self.wanted[:, None]

    def evaluate(self, point):
        error = self._error(point)
        return {name: (error @ root[:, None]).square().sum((-2, -1)) for name, root in self._roots.items()}

    def bases(self, partition):
        found = []
        for seed, inputs, wanted in zip(self.seeds, self.train, self.wanted, strict=True):
            network = self.network(seed)
            batches = Batches(inputs, size=self.batch, generator=torch.Generator().manual_seed(2 * seed + 1))
            def loss(model, batch, wanted=wanted):
                (rows,) = batch
                return (model(rows) - rows @ wanted.mT).square().sum() / len(rows)
            found.append(egop.estimate(egop.Objective(network, loss, batches), rho=egop.Initialization(init_fn=xavier_),
                partition=partition, structure=egop.Full(), samples=4600, generator=torch.Generator().manual_seed(seed), progress=False))
        return found

    def _order(self, epoch):
        if epoch not in self._orders:
            self._orders = {epoch: torch.stack([torch.randperm(self.train.shape[1], generator=torch.Generator().manual_seed(s * 100_003 + epoch)) for s in self.seeds]).to(self.device)}
        return self._orders[epoch]


def _loss(error, inputs):
    return (inputs @ error.mT).square().sum((-2, -1))

def _data(seed, samples):
    g = torch.Generator().manual_seed(seed)
    rows = torch.linalg.qr(torch.randn(samples, 10, generator=g, dtype=torch.float64))[0]
    cols = torch.linalg.qr(torch.randn(10, 10, generator=g, dtype=torch.float64))[0]
    sv = torch.arange(1, 11, dtype=torch.float64) ** -2.0
    return (rows * sv) @ cols.mT, torch.randn(10, 10, generator=g, dtype=torch.float64)

def _root(inputs):
    v, u = torch.linalg.eigh(inputs.mT @ inputs / inputs.shape[1])
    return u * v.clamp_min(0).sqrt()[:, None, :]

"""Results do not depend on rounding, also where gradients have an exact null space."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad, AdamW

import egop
from processes import run

STEPS, BATCH, WIDTH = 20, 5, 12


def make_tanh_network(width=WIDTH):
    """Build a network whose head has a null space (softmax), and whose layers are wider than the batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 6)).double()


def make_dead_network():
    """Build a network with dead units."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 6)).double()
    with torch.no_grad():
        model[0].bias[:4] = -100
    return model


def make_batches(noise=0.0, batch=BATCH, width=WIDTH):
    generator = torch.Generator().manual_seed(1)
    rounding = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(STEPS):
        inputs = torch.randn(batch, width, generator=generator, dtype=torch.float64)
        inputs *= 1 + noise * torch.randn(batch, width, generator=rounding, dtype=torch.float64)
        batches.append((inputs, torch.randint(6, (batch,), generator=generator)))
    return batches


def compute_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def use(base, refresh, **options):
    return lambda model, batches: egop.ReparameterizedOptimizer(model, base, lr=1e-2, refresh=refresh, **options)


def use_estimate(structure, samples):
    def make(model, batches):
        objective = egop.Objective(model, compute_loss, batches)
        generator = torch.Generator().manual_seed(3)
        basis = egop.estimate(objective, structure=structure, samples=samples, generator=generator, progress=False)
        return egop.ReparameterizedOptimizer(model, AdamW, basis, lr=1e-2)

    return make


ONLINE = {
    "Shared": egop.Shared(),
    "Shared output": egop.Shared(side="output"),
    "Kronecker": egop.Kronecker(),
    "Full": egop.Full(),
}
OPTIMIZERS = {
    "EGOP": lambda model, batches: egop.EGOP(model, lr=1e-2),
    **{name: use(AdamW, egop.Online(every=3, structure=structure)) for name, structure in ONLINE.items()},
    "Adagrad": use(Adagrad, egop.Online(every=3)),
    "Sign": use(egop.optim.Sign, egop.Online(every=3), outside=AdamW),
    "Sinkhorn": use(egop.optim.Sinkhorn, egop.Online(every=3), outside=AdamW),
    "PolarAdam": use(egop.optim.PolarAdam, egop.Online(every=3), outside=AdamW),
    "Aligned AdamW": use(AdamW, egop.Aligned()),
    "Aligned Sign": use(egop.optim.Sign, egop.Aligned(), outside=AdamW),
    "Aligned Sinkhorn": use(egop.optim.Sinkhorn, egop.Aligned(), outside=AdamW),
    "estimated Shared": use_estimate(egop.Shared(), 2),
    "estimated Kronecker": use_estimate(egop.Kronecker(), 2),
    "estimated Full, few samples": use_estimate(egop.Full(), 20),
    "estimated Full, many samples": use_estimate(egop.Full(), 200),
    "estimated Auxiliary": use_estimate(egop.Auxiliary(rank=10), 4),
    "estimated Reduced": use_estimate(egop.Reduced(rank=10), 4),
}


@pytest.mark.parametrize("make_network", [make_tanh_network, make_dead_network])
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_inputs_that_differ_by_rounding_give_the_same_training(make_optimizer, make_network):
    ends = []
    for noise in (0.0, 1e-15):
        model, batches = make_network(), make_batches(noise)
        ends.append(train(model, make_optimizer(model, batches), batches))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ["EGOP", "Kronecker", "Sign", "Aligned Sinkhorn", "estimated Shared"])
def test_the_number_of_threads_changes_nothing(name):
    threads, width, ends = torch.get_num_threads(), 40, []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            model, batches = make_tanh_network(width), make_batches(width=width)
            ends.append(train(model, OPTIMIZERS[name](model, batches), batches))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-7)


def train_in_processes(rank, world):
    """Train with half of each batch in each of two processes."""
    ends = {}
    for name, make_optimizer in OPTIMIZERS.items():
        if name.startswith("estimated"):
            continue  # tests/distributed compares estimates
        model, batches = make_tanh_network(), make_batches(batch=6)
        optimizer, parallel = make_optimizer(model, batches), DistributedDataParallel(model)
        ends[name] = train(parallel, optimizer, [(x[rank::world], y[rank::world]) for x, y in batches])
    return ends


def test_two_processes_train_as_one_does():
    one, two = (run(train_in_processes, world)[0] for world in (1, 2))
    for name, end in one.items():
        torch.testing.assert_close(two[name], end, rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")

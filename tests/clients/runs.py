"""One small training, by hand and inside a framework: what the tests of this folder compare.

The network, the data and the loss are those of ``tests/training.py``, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os

import torch

import egop
import training

# Nothing here may reach the network; said before any framework is imported.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1")

MISSING = "install egop[clients] to test the optimizer inside this framework"

# No basis at all (the run equals plain AdamW), one that stays, one that follows the gradients; and the one line.
KINDS = ["none", "fixed", "online", "EGOP"]
# For runs that are divided differently, and so rounded differently: the first gradient alone leaves directions open,
# which rounding would fill, so there is a basis to start from.
DIVIDED = ["none", "fixed", "online from a basis"]
# Sharded by FSDP2. By rows: each process rotates its own rows. The last two see whole matrices.
SHARDED = [*DIVIDED, "online by rows", "EGOP", "aligned from a basis"]


@functools.cache
def basis(seed=0, dtype=torch.float64, structure=None):
    objective = egop.Objective(
        training.network().to(dtype),
        lambda model, pair: training.loss_of(model, *pair),
        [tuple(each.to(dtype) for each in training.batch(99))],
    )
    generator = torch.Generator().manual_seed(seed)
    return egop.estimate(
        objective,
        structure=structure or egop.Kronecker(),
        partition="parameter",
        samples=12,
        generator=generator,
        progress=False,
    )


def part_of(basis, names):
    return egop.Basis([basis[name] for name in basis if name in names])


def optimizer_of(model, kind, **more):
    """Build an optimizer that renews its basis every third step, so that short runs see renewals."""
    settings = {"lr": 0.02, "weight_decay": 0.1} | more
    if kind == "EGOP":
        return egop.EGOP(model, every=3, **settings)
    if kind == "aligned from a basis":
        start, refresh = basis(structure=egop.Shared(side="smaller")), egop.Aligned()
        return egop.ReparameterizedOptimizer(
            model, egop.optim.Sinkhorn, start, refresh=refresh, outside=torch.optim.AdamW, **settings
        )
    if kind == "online by rows":
        settings |= {"basis": basis(structure=egop.Shared()), "refresh": egop.Online(every=3)}
    if kind in ("fixed", "online from a basis"):
        double = next(model.parameters()).dtype == torch.float64
        settings["basis"] = basis(dtype=torch.float64 if double else torch.float32)
    if kind in ("online", "online from a basis"):
        settings["refresh"] = egop.Online(every=3)
    elif kind == "part":  # all but the last layer, which is added later
        named = list(model.named_parameters())[:-2]
        settings["basis"] = part_of(basis(), dict(named))
        return egop.ReparameterizedOptimizer(named, torch.optim.AdamW, **settings)
    return egop.ReparameterizedOptimizer(model, torch.optim.AdamW, **settings)


def batches(count, first=0):
    return [training.batch(step) for step in range(first, first + count)]


# What a user does to an optimizer while it runs: functions that are called before each step. In ACTIONS they come with
# the kind of optimizer that they are done to.


def _rebase(step, model, optimizer, kept):
    if step == 3:
        optimizer.rebase(basis(seed=1))


def _rebase_from_none(step, model, optimizer, kept):
    if step == 0:
        optimizer.rebase(basis())


def _renew_basis(step, model, optimizer, kept):
    if step == 5:
        optimizer.renew_basis()


def _load_state_dict(step, model, optimizer, kept):
    if step == 2:
        kept.update(model=weights(model), optimizer=copy.deepcopy(optimizer.state_dict()))
    if step == 5:
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])


def _add_param_group(step, model, optimizer, kept):
    if step == 2:
        late = list(model.named_parameters())[-2:]
        optimizer.add_param_group({"params": late, "basis": part_of(basis(), dict(late)), "lr": 0.01})


def _change_lr(step, model, optimizer, kept):
    for group in optimizer.param_groups:
        group["lr"] = 0.02 / (1 + step)


ACTIONS = {
    "rebase": ("fixed", _rebase),
    "rebase from none": ("none", _rebase_from_none),
    "renew_basis": ("online", _renew_basis),
    "load_state_dict, fixed": ("fixed", _load_state_dict),
    "load_state_dict, online": ("online", _load_state_dict),
    "add_param_group": ("part", _add_param_group),
    "a new lr": ("fixed", _change_lr),
}


def loop(
    kind, count, *, model=None, optimizer=None, clip=None, schedule=None, act=None, context=contextlib.nullcontext
):
    """Train in a plain loop, to compare a framework's run with; return the model and the optimizer."""
    model = training.network() if model is None else model
    optimizer = optimizer_of(model, kind) if optimizer is None else optimizer
    scheduler = None if schedule is None else schedule(optimizer)
    dtype, kept = next(model.parameters()).dtype, {}
    for step, (inputs, targets) in enumerate(batches(count)):
        if act is not None:
            act(step, model, optimizer, kept)
        optimizer.zero_grad()
        with context():
            loss = training.loss_of(model, inputs.to(dtype), targets.to(dtype))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(model, other):
    """Return True if two models, or their weights, are equal bit for bit."""
    left, right = (each if isinstance(each, dict) else weights(each) for each in (model, other))
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def distance(model, other):
    """Return the largest difference between two models, or between their weights."""
    left, right = (each if isinstance(each, dict) else weights(each) for each in (model, other))
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def launched(rank, world):
    """Make a process of ``processes.run`` look as if torchrun had started it, which frameworks go by."""
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    port = 29511 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # tests run beside each other
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    known["CUDA_VISIBLE_DEVICES"] = ""  # as on a machine without a GPU: these processes could not share one
    os.environ.update({name: str(value) for name, value in known.items()})

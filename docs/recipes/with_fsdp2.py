"""Train sharded weights: ``torchrun --standalone --nproc-per-node 4 docs/recipes/with_fsdp2.py run``.

Run it again, on any number of processes: it continues from the last checkpoint. For AdamW add ``AdamW`` to the command.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import egop

STEPS, SAVE_EVERY, BATCH = 60, 20, 128
LR = 3e-2  # the best rate for AdamW of 1e-2, 3e-2 and 1e-1


def train(folder, name="EGOP"):
    """Train on made-up data. Each process has a part of every weight, and of every batch."""
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = egop.EGOP(model, lr=LR) if name == "EGOP" else torch.optim.AdamW(model.parameters(), lr=LR)
    first, newest = 0, max((path.parent for path in folder.glob("step-*/.metadata")), default=None)
    if newest:  # torch writes .metadata last, so a folder that has this file is complete
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=newest)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        first = int(newest.name.removeprefix("step-"))
    for step in range(first, STEPS):
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))  # the same batch after a restart
        inputs = inputs.chunk(world)[rank].to(device)
        optimizer.zero_grad()
        targets = (inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]).sin()
        (loss := (model(inputs) - targets).square().mean()).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step + 1:06d}")
            dist.all_reduce(mean := loss.detach() / world)
            if rank == 0:
                print(f"{name}, step {step + 1}: loss {mean.item():.3f}", flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *sys.argv[2:])
    dist.barrier()
    gc.collect()  # the sharded model holds process groups: free it first, or the process may abort when it exits
    dist.destroy_process_group()

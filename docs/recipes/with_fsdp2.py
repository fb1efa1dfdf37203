"""Train sharded weights: ``torchrun --standalone --nproc-per-node 4 docs/recipes/with_fsdp2.py run``.

Run it again, on any number of processes: it continues from the last checkpoint. For AdamW add ``AdamW`` to the command.
"""

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

STEPS, SAVE_EVERY, BATCH, LR = 20, 10, 32, 3e-2  # best for AdamW: 3e-2 of 1e-2, 3e-2, 1e-1


def main(folder, name="EGOP"):
    """Train on made-up data. Each process has a part of every weight, and of every batch."""
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if name == "EGOP":  # Shared rotates each row separately: a process rotates its own rows, and a step sends nothing
        refresh = egop.Online(structure={"[02].weight": egop.Shared()})
        optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=LR, refresh=refresh)
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
        loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step + 1:06d}")
            dist.all_reduce(mean := loss.detach() / world)
            if rank == 0:
                print(f"{name}, step {step + 1}: loss {mean.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

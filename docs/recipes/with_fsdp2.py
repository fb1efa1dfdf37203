"""Train sharded weights: ``torchrun --standalone --nproc-per-node 4 docs/recipes/with_fsdp2.py run``.

Run it again, on any number of processes: it continues from the newest complete checkpoint in ``run``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import egop

STEPS, SAVE_EVERY, BATCH = 20, 10, 32


def save(folder, step, model, optimizer):
    """Save to a new folder. torch writes ``.metadata`` last, so a folder that has this file is complete."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step:06d}")


def resume(folder, model, optimizer):
    """Load the newest complete checkpoint, if there is one, and return its step."""
    newest = max((path.parent for path in folder.glob("step-*/.metadata")), default=None)
    if newest is None:
        return 0
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return int(newest.name.removeprefix("step-"))


def main(folder):
    """Train on made-up data. Each process has a part of every weight, and of every batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # Shared rotates each row on its own, so a process rotates the rows it has, and a step sends nothing.
    refresh = egop.Online(structure={"0.weight": egop.Shared(), "2.weight": egop.Shared()})
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=3e-3, refresh=refresh)
    for step in range(resume(folder, model, optimizer), STEPS):
        inputs = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))  # the same batch after a restart
        inputs = inputs.chunk(world)[rank].to(device)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, step + 1, model, optimizer)
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

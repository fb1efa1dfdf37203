"""AdamW in sharded bases: ``torchrun --standalone --nproc-per-node 2 docs/recipes/with_fsdp2.py``."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import egop


def main():
    """Train on data made up here; each process has its own part of every weight, and of every batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # One side only, that of the inputs: rows are rotated where they lie, and a step sends nothing.
    refresh = egop.Online(structure={"0.weight": egop.Shared(), "2.weight": egop.Shared()})
    optimizer = egop.ReparameterizedOptimizer(model, torch.optim.AdamW, lr=3e-3, refresh=refresh)
    torch.manual_seed(dist.get_rank())
    for _ in range(20):
        inputs = torch.randn(32, 16, device=device)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

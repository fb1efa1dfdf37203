"""Save with ``torch.save`` and resume: ``python docs/recipes/with_checkpoints.py run``.

Run it again after a crash: it continues from the last checkpoint, and ends bit for bit where an uninterrupted run ends.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

import egop

STEPS, SAVE_EVERY = 50, 10


def save(state, path):
    """Write a new file, then rename it: if the process is killed, the old checkpoint is still there."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def main(folder):
    """Train on made-up data."""
    path = Path(folder) / "last.pt"
    path.parent.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = egop.EGOP(model, lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["step"]
    for step in range(first, STEPS):
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))  # the same batch after a restart
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % SAVE_EVERY == 0:
            save({name: part.state_dict() for name, part in parts.items()} | {"step": step + 1}, path)
            print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

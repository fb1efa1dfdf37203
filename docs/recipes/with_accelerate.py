"""EGOP with Accelerate: ``python docs/recipes/with_accelerate.py``, or ``accelerate launch`` on several devices."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egop


def main():
    """Train on data made up here."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = egop.EGOP(model, lr=3e-3)
    inputs = torch.randn(512, 16)
    data = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for inputs, targets in data:
        with accelerator.accumulate(model):
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

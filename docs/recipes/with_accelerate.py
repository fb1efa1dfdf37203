"""EGOP with Accelerate, with AdamW for comparison: ``python docs/recipes/with_accelerate.py``.

Use ``accelerate launch`` on several devices.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egop

LR = 3e-2  # the best rate for AdamW of 1e-2, 3e-2 and 1e-1


def train(accelerator, make_optimizer):
    """Train on made-up data and return the mean loss of the last epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inputs = torch.randn(512, 16)
    targets = (inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]).sin()
    data = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    model, optimizer, data = accelerator.prepare(model, make_optimizer(model), data)
    for _ in range(5):
        losses = []
        for inputs, targets in data:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    loss = train(accelerator, lambda model: torch.optim.AdamW(model.parameters(), lr=LR))
    accelerator.print(f"AdamW: loss {loss.item():.3f}")
    loss = train(accelerator, lambda model: egop.EGOP(model, lr=LR))
    accelerator.print(f"EGOP:  loss {loss.item():.3f}")

"""
A learning rate from short runs
===============================

``egop.find_lr`` trains copies of the model for a few steps at each of several rates and returns two or three to try.
The model itself stays as it was.
"""

import torch
from torch import nn

import egop

torch.manual_seed(0)
inputs = torch.randn(640, 24) @ (torch.randn(24, 24) * torch.arange(1, 25) ** -1.0)
targets = torch.tanh(inputs @ torch.randn(24, 4))
model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 4))
batches = list(zip(inputs.split(64), targets.split(64), strict=True))
objective = egop.Objective(model, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), batches)

found = egop.find_lr(objective, egop.EGOP, steps=300, progress=False)
print(found)

# %%
# The losses of the first stage. The stars are the rates to try, where the first stage had them.

figure = found.plot()

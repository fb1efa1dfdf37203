"""Try the installed distributions without a checkout: ``make smoke`` runs a copy of it in a fresh environment."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import egop
import egop_lab

PROGRAMS = Path(sys.executable).parent


def train(optimizer, model):
    """Return the loss after 30 steps."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :1].sin()).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def make_model():
    """Return a small network; every call gives the same weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1))


def loss_fn(model, batch):
    """Return a loss."""
    return model(batch).square().mean()


def run(*command):
    """Return what a command prints."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=300).stdout


def main():
    """Train, save, estimate, and call the commands."""
    for package in (egop, egop_lab):
        assert Path(package.__file__).is_relative_to(sys.prefix), f"{package.__file__} is not in this environment"
    assert egop.__version__ == metadata.version("egop-lab")
    for options in ({}, {"rotate": False}):
        model = make_model()
        optimizer = egop.EGOP(model, lr=1e-2, **options)
        first, last = train(optimizer, model), train(optimizer, model)
        assert last < first < 1, (options, first, last)
        torch.save(optimizer.state_dict(), "state.pt")
        optimizer.load_state_dict(torch.load("state.pt", weights_only=True))
    basis = egop.estimate(egop.Objective(make_model(), loss_fn, [torch.randn(16, 8)]), samples=16, progress=False)
    basis.save("basis.safetensors")
    assert list(egop.Basis.load("basis.safetensors")) == list(basis)
    version = f" {egop.__version__}\n"
    assert run(PROGRAMS / "egop", "--version") == f"egop{version}"
    assert run(PROGRAMS / "egop-lab", "--version") == f"egop-lab{version}"
    Path("models.py").write_text("from torch import nn\ndef make(): return nn.Linear(8, 6)\n")
    assert "54 parameters" in run(PROGRAMS / "egop", "plan", "models:make")
    assert "digits" in run(PROGRAMS / "egop-lab", "reproduce")
    print(f"egop and egop-lab {egop.__version__} work in {sys.prefix} with torch {torch.__version__}")


if __name__ == "__main__":
    main()

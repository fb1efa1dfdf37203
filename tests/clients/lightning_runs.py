"""The training of ``runs.py`` as a LightningModule."""

from __future__ import annotations

import warnings

import runs  # says that nothing may reach the network
import training

# isort: split
import lightning
import torch

warnings.filterwarnings("ignore", module=r"lightning(\..*)?")  # advice on workers and loggers


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)


class Module(lightning.LightningModule):
    """As most users write one: the framework calls backward and step."""

    def __init__(self, kind="fixed", optimizer=None, network=None):
        super().__init__()
        self.network = training.network() if network is None else network
        self.kind = kind
        self.made = optimizer or (lambda: runs.optimizer_of(self.network, kind))

    def configure_optimizers(self):
        made = self.made()
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule(made), "interval": "step"}}

    def training_step(self, batch, index):
        return training.loss_of(self.network, *batch)

    def validation_step(self, batch, index):
        self.log("loss", training.loss_of(self.network, *batch))


class ByHand(Module):
    """Manual optimization: what ``self.optimizers()`` gives is a wrapper, to which ``act`` is applied."""

    def __init__(self, kind, act):
        super().__init__(kind)
        self.automatic_optimization = False
        self.act, self.kept = act, {}

    def configure_optimizers(self):
        return self.made()

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        self.act(index, self.network, optimizer, self.kept)
        optimizer.zero_grad()
        self.manual_backward(training.loss_of(self.network, *batch))
        optimizer.step()


def trainer(**settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    once = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "max_epochs": 1}
    return lightning.Trainer(**{"accelerator": "cpu", "devices": 1} | quiet | once | settings)


def loader(count, first=0):
    return torch.utils.data.DataLoader(runs.batches(count, first), batch_size=None)


def fit(module, count, **settings):
    trainer(**settings).fit(module, loader(count))
    return module

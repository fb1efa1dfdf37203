"""EGOP inside Lightning, with AdamW for comparison: ``python docs/recipes/with_lightning.py``."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egop

LR = 1e-1  # the best rate for AdamW of 3e-2, 1e-1 and 3e-1


class Regression(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self, optimizer_class):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer_class = optimizer_class

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = (self.network(inputs) - targets).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        """Return the optimizer, and a schedule as with any other."""
        if self.optimizer_class is egop.EGOP:
            optimizer = egop.EGOP(self, lr=LR)  # the module, not its parameters
        else:
            optimizer = self.optimizer_class(self.parameters(), lr=LR)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(optimizer_class):
    """Train on made-up data and return the training loss of the last epoch."""
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    targets = (inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]).sin()
    data = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(optimizer_class), data)
    return trainer.callback_metrics["loss"]


if __name__ == "__main__":
    print(f"AdamW: loss {train(torch.optim.AdamW):.3f}")
    print(f"EGOP:  loss {train(egop.EGOP):.3f}")

"""EGOP inside Lightning: ``python docs/recipes/with_lightning.py``."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import egop


class Regression(lightning.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        """The loss of a batch."""
        inputs, targets = batch
        loss = (self.network(inputs) - targets).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """The one line, and a schedule as with any other optimizer."""
        optimizer = egop.EGOP(self, lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    """Train on data made up here."""
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(512, 16)
    data = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Regression(), data)
    print(f"loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()

"""Hugging Face's Trainer with a schedule-free optimizer inside: it evaluates the averaged weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import egop

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
ScheduleFreeAdamW = pytest.importorskip("pytorch_optimizer").ScheduleFreeAdamW


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.fc(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Watch(transformers.TrainerCallback):
    """Notes, after each evaluation, in which mode and at which weights the model was."""

    def __init__(self, optimizer):
        self.optimizer, self.seen = optimizer, []

    def on_evaluate(self, args, state, control, model, metrics, **others):
        mode = self.optimizer.param_groups[0]["train_mode"]
        self.seen.append((mode, metrics["eval_loss"], model.fc.weight.detach().clone(), model.fc.bias.detach().clone()))


def test_the_trainer_evaluates_the_averaged_weights(tmp_path):
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(64, 4)
    data = [{"x": one, "labels": label} for one, label in zip(x, x.argmax(1) % 3, strict=True)]
    optimizer = egop.ReparameterizedOptimizer(model, ScheduleFreeAdamW, refresh=egop.Online(every=2), lr=0.05)
    watch = Watch(optimizer)
    arguments = transformers.TrainingArguments(
        tmp_path, use_cpu=True, report_to=[], max_steps=6, per_device_train_batch_size=16, eval_strategy="steps",
        eval_steps=3, save_strategy="no", lr_scheduler_type="constant", disable_tqdm=True,
        per_device_eval_batch_size=64,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None), callbacks=[watch]
    )
    trainer.train()
    assert [mode for mode, *_ in watch.seen] == [False, False]
    labels = x.argmax(1) % 3
    _, loss, weight, bias = watch.seen[-1]
    assert F.cross_entropy(F.linear(x, weight, bias), labels).item() == pytest.approx(loss, rel=1e-5)
    optimizer.train()
    assert not torch.allclose(model.fc.weight, weight, atol=1e-4)  # the training weights are others
    (block,) = optimizer.blocks
    state = optimizer.inner.state[block.coordinates[0]]
    beta = optimizer.param_groups[0]["betas"][0]
    average = block.coordinates[0].detach().lerp(state["z"], 1 - 1 / beta)  # x of y = beta x + (1 - beta) z
    torch.testing.assert_close(block.change.decode(average)[0], weight, rtol=0, atol=1e-5)

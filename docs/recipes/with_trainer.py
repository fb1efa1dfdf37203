"""EGOP inside Hugging Face's Trainer, with AdamW for comparison: ``python docs/recipes/with_trainer.py``."""

import tempfile

import torch
import transformers

import egop
from egop.extras import trainer_optimizer

LR = 3e-2  # the best rate for AdamW of 1e-2, 3e-2 and 1e-1


def make_model():
    """Return a tiny GPT-2; every call gives the same weights."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


def train(model, **options):
    """Train on made-up token sequences and return the mean training loss."""
    tokens = torch.randint(64, (128, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(16)
    data = [{"input_ids": row % 64, "labels": row % 64} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, learning_rate=LR, max_steps=60, warmup_steps=6, weight_decay=0.01, optim="adamw_torch",
            report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
        )  # fmt: skip
        return transformers.Trainer(model, arguments, train_dataset=data, **options).train().training_loss


if __name__ == "__main__":
    print(f"AdamW: loss {train(make_model()):.3f}")
    model = make_model()
    made = trainer_optimizer(model, egop.EGOP, lr=LR)  # Trainer creates it, from its own parameter groups
    print(f"EGOP:  loss {train(model, optimizer_cls_and_kwargs=made):.3f}")

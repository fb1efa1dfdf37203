"""EGOP inside Hugging Face's Trainer: ``python docs/recipes/with_trainer.py``."""

import tempfile

import torch
import transformers

import egop
from egop.extras import trainer_optimizer


def main():
    """Train a tiny GPT-2 on token sequences made up here."""
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(64, (128, 1)) + torch.arange(16)
    data = [{"input_ids": row % 64, "labels": row % 64} for row in tokens]

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=20, weight_decay=0.1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        )
        made = trainer_optimizer(model, egop.EGOP, lr=3e-3)  # Trainer makes it, from its own parameter groups
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=made)
        print(f"loss {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()

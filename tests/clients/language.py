"""A tiny GPT-2 with random weights, and sentences for it: what Hugging Face's libraries are tried with."""

from __future__ import annotations

import warnings

import runs  # noqa: F401  (says that nothing may reach the network)

# isort: split
import torch
import transformers

warnings.filterwarnings("ignore", module=r"(transformers|accelerate|peft)(\..*)?")

# The weights that are matrices of a layer; embeddings, positions and the tied head are not to be rotated.
MATRICES = {
    f"transformer.h.{layer}.{name}.weight"
    for layer in range(2)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
}


def gpt2(seed=0):
    """Build GPT-2 in float64, so that rounding differences stay small under Adam; its loss is still in float32."""
    sizes = {"vocab_size": 24, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    steady = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **steady, bos_token_id=0, eos_token_id=0, use_cache=False)
        ).double()


def sentences(count=24):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (count, 8), generator=generator).cumsum(1) % 24
    return [{"input_ids": row, "labels": row} for row in tokens]

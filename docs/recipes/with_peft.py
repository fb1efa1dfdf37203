"""EGOP for the adapters of PEFT: ``python docs/recipes/with_peft.py``."""

import peft
import torch
import transformers

import egop


def main():
    """Train adapters of a tiny GPT-2 on token sequences made up here."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    adapters = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = egop.EGOP(trained, model=model, lr=3e-3)
    for _ in range(20):
        tokens = (torch.randint(64, (16, 1)) + torch.arange(16)) % 64
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    print(f"{optimizer}\nloss {loss.item():.3f}")


if __name__ == "__main__":
    main()

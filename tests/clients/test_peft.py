"""With PEFT: adapters of low rank on a model that stays as it is."""

from __future__ import annotations

import pytest
import torch

import runs

peft = pytest.importorskip("peft", reason=runs.MISSING)
transformers = pytest.importorskip("transformers", reason=runs.MISSING)

import egop
from egop.extras.frameworks import trainer_optimizer
from language import gpt2, sentences

STEPS = 6


def adapted(seed=0):
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(gpt2(), config).double()


def batch():
    rows = sentences(8)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def optimizer_of(model, **settings):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": 1e-2, "refresh": egop.Online(every=2)} | settings
    return egop.ReparameterizedOptimizer(trained, torch.optim.AdamW, model=model, **settings)


def steps(model, optimizer, count=STEPS):
    for _ in range(count):
        optimizer.zero_grad()
        model(**batch()).loss.backward()
        optimizer.step()


def moved(model, before):
    return {name for name, value in runs.weights(model).items() if not torch.equal(value, before[name])}


def adapters(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_training_moves_the_adapters_and_nothing_else():
    model = adapted()
    before = runs.weights(model)
    optimizer = optimizer_of(model)
    steps(model, optimizer)
    assert all("lora_" in name for name in adapters(model))
    assert len(adapters(model)) == 8
    assert moved(model, before) == adapters(model)


def test_every_adapter_is_turned():
    model = adapted()
    optimizer = optimizer_of(model)
    steps(model, optimizer, 1)
    turned = {name for block in optimizer.blocks for name in block.change.block.parameters}
    assert turned == adapters(model)


def test_without_a_basis_the_run_is_that_of_adamw():
    model, plain = adapted(), adapted()
    steps(model, optimizer_of(model, refresh=None))
    steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert runs.distance(model, plain) < 1e-9


def test_saved_adapters_give_the_trained_model(tmp_path):
    model = adapted()
    steps(model, optimizer_of(model))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**batch()).logits, model(**batch()).logits)
        assert not torch.equal(adapted()(**batch()).logits, model(**batch()).logits)


def test_a_state_dict_beside_the_adapters_resumes_bit_for_bit(tmp_path):
    whole, half, resumed = adapted(), adapted(), adapted(seed=4)
    steps(whole, optimizer_of(whole))
    first = optimizer_of(half)
    steps(half, first, 3)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    peft.set_peft_model_state_dict(resumed, peft.get_peft_model_state_dict(half))
    optimizer = optimizer_of(resumed)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(resumed, optimizer, 3)
    assert runs.same(whole, resumed)


def test_an_adapter_trained_by_trainer_moves_alone(tmp_path):
    model = adapted()
    before = runs.weights(model)
    made = trainer_optimizer(model, torch.optim.AdamW, lr=1e-2, refresh=egop.Online(every=2))
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=3, **quiet)
    transformers.Trainer(model, arguments, train_dataset=sentences(), optimizer_cls_and_kwargs=made).train()
    assert moved(model, before) == adapters(model)

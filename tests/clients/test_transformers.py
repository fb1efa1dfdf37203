"""Inside Hugging Face's Trainer."""

from __future__ import annotations

import functools

import pytest
import torch

import runs

transformers = pytest.importorskip("transformers", reason=runs.MISSING)
pytest.importorskip("accelerate", reason=runs.MISSING)

import egop
from egop.extras.frameworks import trainer_optimizer
from language import MATRICES, gpt2, sentences

STEPS = 6
LR = 3e-3


def trainer(model, folder, arguments=(), **given):
    usual = {"per_device_train_batch_size": 4, "max_steps": STEPS, "weight_decay": 0.1, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **usual | quiet | dict(arguments))
    return transformers.Trainer(model, arguments, train_dataset=sentences(), eval_dataset=sentences(8), **given)


def trained(model, folder, resume=None, **given):
    made = trainer(model, folder, **given)
    made.train(resume_from_checkpoint=resume)
    return made


def settings_of(kind):
    return {
        "none": {},
        "fixed": {"basis": rotation()},
        "online": {"refresh": egop.Online(every=2)},
        "EGOP": {"every": 2},
    }[kind]


@functools.cache
def rotation():
    """Draw a random rotation for the layers' matrices only."""
    objective = egop.Objective(gpt2(), lambda model, batch: model(**batch).loss, [stacked(sentences(4))])
    partition = {name: [name] for name in sorted(MATRICES)}
    structure = egop.extras.RandomRotation(seed=1)
    rho = egop.Recentered(0.01)
    return egop.estimate(objective, rho=rho, partition=partition, structure=structure, samples=2, progress=False)


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def decay_groups(model, weight_decay=0.1):
    """Return the parameter groups that Trainer makes, with names."""
    named = list(model.named_parameters())
    with_decay = [pair for pair in named if "ln_" not in pair[0] and "bias" not in pair[0]]
    without = [pair for pair in named if "ln_" in pair[0] or "bias" in pair[0]]
    return [{"params": with_decay, "weight_decay": weight_decay}, {"params": without, "weight_decay": 0.0}]


def ours(made):
    return made.optimizer.optimizer  # below Accelerate's


def test_without_a_basis_the_run_is_that_of_adamw(tmp_path):
    model, plain = gpt2(), gpt2()
    optimizer = egop.ReparameterizedOptimizer(decay_groups(model), torch.optim.AdamW, lr=LR, model=model)
    trained(model, tmp_path, optimizers=(optimizer, None))
    trained(plain, tmp_path, optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": LR}))
    assert runs.distance(model, plain) < 1e-6
    assert runs.distance(model, gpt2()) > 1e-2


@pytest.mark.parametrize("kind", runs.KINDS[:3])
def test_the_optimizer_that_trainer_makes_is_the_one_a_user_would_make(kind, tmp_path):
    model, other = gpt2(), gpt2()
    made = trainer_optimizer(model, torch.optim.AdamW, lr=LR, **settings_of(kind))
    its = trained(model, tmp_path, optimizer_cls_and_kwargs=made)
    assert [group["weight_decay"] for group in ours(its).param_groups] == [0.1, 0.0]
    optimizer = egop.ReparameterizedOptimizer(
        decay_groups(other), torch.optim.AdamW, lr=LR, model=other, **settings_of(kind)
    )
    trained(other, tmp_path, optimizers=(optimizer, None))
    assert runs.same(model, other)


def test_the_optimizer_that_trainer_makes_turns_layers_and_leaves_embeddings_and_heads(tmp_path):
    model = gpt2()
    made = trainer_optimizer(model, torch.optim.AdamW, lr=LR, refresh=egop.Online(every=2))
    optimizer = ours(trained(model, tmp_path, optimizer_cls_and_kwargs=made))
    assert isinstance(optimizer, egop.ReparameterizedOptimizer)
    assert {name for block in optimizer.blocks for name in block.change.block.parameters} == MATRICES
    assert runs.distance(model, gpt2()) > 1e-2


def test_the_one_line_optimizer_is_made_from_trainers_groups(tmp_path):
    model, other = gpt2(), gpt2()
    its = trained(model, tmp_path, optimizer_cls_and_kwargs=trainer_optimizer(model, egop.EGOP, lr=LR, every=2))
    optimizer = ours(its)
    assert isinstance(optimizer, egop.EGOP)
    assert set(optimizer.basis) == MATRICES
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    expected = egop.EGOP(decay_groups(other), lr=LR, every=2, model=other)
    trained(other, tmp_path, optimizers=(expected, None))
    assert runs.same(model, other)
    # As a class with keywords of its own: then Trainer gives it the model in the place of groups.
    third = gpt2()
    given = {"model": third, "lr": LR, "weight_decay": 0.2}
    alone = ours(trained(third, tmp_path, optimizer_cls_and_kwargs=(egop.EGOP, given)))
    assert set(alone.basis) == MATRICES
    assert [group["weight_decay"] for group in alone.param_groups] == [0.2]
    with pytest.raises(TypeError, match="EGOP has its own refresh"):
        trainer_optimizer(model, egop.EGOP, lr=LR, refresh=egop.Online())


def test_the_names_of_nameless_parameters_are_the_models(tmp_path):
    model = gpt2()
    made = trainer_optimizer(model, torch.optim.SGD, lr=LR)
    groups = ours(trained(model, tmp_path, optimizer_cls_and_kwargs=made)).param_groups
    names = [name for group in groups for name in group["param_names"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    own = dict(model.named_parameters())
    assert sorted(names) == sorted(own)
    assert all(own[name] is parameter for name, parameter in zip(names, parameters, strict=True))


def test_a_weight_decay_that_trainer_would_replace_is_refused():
    with pytest.raises(TypeError, match=r"weight_decay=0\.2 would be lost.*TrainingArguments"):
        trainer_optimizer(gpt2(), torch.optim.AdamW, lr=LR, weight_decay=0.2)


@pytest.mark.parametrize("kind", runs.KINDS)
def test_a_run_resumed_from_a_checkpoint_ends_as_the_whole_one(kind, tmp_path):
    def run(model, resume=None):
        base = egop.EGOP if kind == "EGOP" else torch.optim.AdamW
        made = trainer_optimizer(model, base, lr=LR, **settings_of(kind))
        saving = {"save_strategy": "steps", "save_steps": 3}
        return trained(model, tmp_path, resume=resume, arguments=saving, optimizer_cls_and_kwargs=made)

    whole, resumed = gpt2(), gpt2(seed=5)
    run(whole)
    run(resumed, resume=str(tmp_path / "checkpoint-3"))
    assert runs.same(whole, resumed)

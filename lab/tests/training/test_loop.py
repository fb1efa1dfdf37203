import math
import time

import pytest
import torch
from torch import nn

from egop_lab.training.loop import Curve, train


def regression(lr=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(40, 3, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [2.0], [3.0]])
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batches = list(zip(inputs.split(10), targets.split(10), strict=True))
    return model, torch.optim.SGD(model.parameters(), lr=lr), batches, (inputs, targets)


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def run(lr=0.1, epochs=5, **options):
    model, optimizer, batches, whole = regression(lr)
    options.setdefault("evaluate", lambda model: {"loss": squared_error(model, whole)})
    curve = train(model, optimizer, squared_error, batches, epochs, progress=False, **options)
    return curve, model, whole


def test_curve_has_the_start_and_one_loss_per_epoch():
    curve, model, whole = run(epochs=5)
    assert len(curve.loss) == 6
    assert curve.loss[0] == pytest.approx(whole[1].square().mean().item())
    assert curve.final == pytest.approx(squared_error(model, whole).item())
    assert curve.final < 0.01 * curve.loss[0]
    assert not curve.diverged


def test_loop_matches_a_plain_one():
    _, trained, _ = run(epochs=3)
    model, optimizer, batches, _ = regression()
    for _ in range(3):
        for batch in batches:
            optimizer.zero_grad()
            squared_error(model, batch).backward()
            optimizer.step()
    assert torch.equal(trained.weight, model.weight)


def test_scheduler_advances_after_every_step():
    model, optimizer, batches, _ = regression(lr=1.0)
    rates = []
    optimizer.register_step_pre_hook(lambda own, *_: rates.append(own.param_groups[0]["lr"]))
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 / (1 + step))
    nothing = {"evaluate": lambda _: {"loss": 1.0}, "progress": False}
    train(model, optimizer, squared_error, batches, 2, scheduler=falling, **nothing)
    assert rates == pytest.approx([0.1 / (1 + step) for step in range(2 * len(batches))])


def test_other_metrics_are_recorded_by_epoch():
    curve, _, _ = run(epochs=2, evaluate=lambda model: {"loss": 1.0, "norm": model.weight.norm()})
    assert len(curve.metrics["norm"]) == 3
    assert curve.metrics["norm"][0] == 0 < curve.metrics["norm"][2]


def test_zero_epochs_only_evaluate():
    curve, model, _ = run(epochs=0)
    assert len(curve.loss) == 1
    assert not model.weight.any()


def test_evaluation_runs_in_eval_mode_without_gradients():
    modes = []

    def evaluate(model):
        modes.append((model.training, torch.is_grad_enabled()))
        return {"loss": 1.0}

    _, model, _ = run(epochs=1, evaluate=evaluate)
    assert modes == [(False, False)] * 2
    assert model.training


def test_modules_keep_their_modes():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model[1].eval()
    optimizer, modes = torch.optim.SGD(model.parameters(), lr=0.1), []

    def loss(model, batch):
        modes.append([part.training for part in model])
        return squared_error(model, batch)

    _, _, batches, _ = regression()
    train(model, optimizer, loss, batches[:1], 2, evaluate=lambda model: {"loss": 1.0}, progress=False)
    assert [*modes, [part.training for part in model]] == [[True, False, True]] * 3


def test_diverging_run_stops(capsys):
    model, optimizer, batches, whole = regression(lr=1e4)
    curve = train(
        model, optimizer, squared_error, batches, 100, evaluate=lambda model: {"loss": squared_error(model, whole)}
    )
    assert curve.diverged
    assert not math.isfinite(curve.final)
    assert len(curve.loss) < 50
    assert "diverged" in capsys.readouterr().err


def test_mode_is_restored_after_an_error():
    model, optimizer, batches, _ = regression()
    model.eval()

    def broken(model, batch):
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        train(model, optimizer, broken, batches, 1, evaluate=lambda model: {"loss": 1.0}, progress=False)
    assert not model.training


def test_seconds_exclude_evaluation():
    def slow(model):
        time.sleep(0.2)
        return {"loss": 1.0}

    curve, _, _ = run(epochs=2, evaluate=slow)
    assert 0 < curve.seconds < 0.2


@pytest.mark.parametrize(("target", "expected"), [(5.0, 0), (2.0, 2), (1.5, 2), (0.5, None)])
def test_epochs_to_a_loss(target, expected):
    assert Curve(loss=(4.0, 3.0, 1.0, 2.0)).epochs_to(target) == expected

from __future__ import annotations

import pytest
import torch

from egop.optim import RotatedPolarAdam
from egop_lab.race import train
from egop_lab.race.problems import make_problem
from egop_lab.race.tasks import TASKS, Run
from egop_lab.race.variants import VariantPolarAdam


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_without_options_the_variant_takes_the_steps_of_egop(shape):
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(3, *shape, dtype=torch.float64, generator=generator)

    def build(kind, **options):
        group = {"params": [torch.nn.Parameter(weight.clone()) for weight in start], "update_rms": 0.4}
        return kind([group], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, **options)

    start = draw()
    optimizers = [build(RotatedPolarAdam), build(VariantPolarAdam)]
    optimizers += [build(VariantPolarAdam, of_momentum=True), build(VariantPolarAdam, both_sides=True)]
    for _ in range(8):
        gradients = draw()
        for optimizer in optimizers:
            for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
    egop, same, *others = (torch.stack(each.param_groups[0]["params"]).detach() for each in optimizers)
    # Cholesky-QR shifts weak directions a little differently.
    torch.testing.assert_close(same, egop, rtol=0, atol=2e-4)
    for other in others:
        assert (other - egop).abs().max() > 2e-3


@pytest.mark.parametrize("scale", [2, 4])
def test_parameters_outside_may_have_a_multiple_of_the_rate(scale, monkeypatch):
    task = TASKS["tiny"]
    run = Run(
        task="tiny", method=f"EGOP, outside rate x {scale}", steps=4, seed=0, rate=10, beta=0.95, warmup=2, clip=1.0
    )
    made = []
    make = train.make_optimizer
    monkeypatch.setattr(train, "make_optimizer", lambda *arguments: made.append(make(*arguments)) or made[0])
    train.train(make_problem(task, None, torch.device("cpu")), task, run)
    inside, outside = made[0].param_groups[0], made[0].param_groups[-1]
    assert outside["lr"] == scale * inside["lr"] > 0
    assert "update_rms" in inside
    assert "update_rms" not in outside

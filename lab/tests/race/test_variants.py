from __future__ import annotations

import pytest
import torch

from egop.optim import RotatedPolarAdam
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

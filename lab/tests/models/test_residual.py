"""The residual networks are torchvision's, down to the names; their start repeats by its generator."""

from __future__ import annotations

import math

import pytest
import torch

from egop_lab.models.residual import ResidualNetwork, initialize_


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def resnet34(classes=1000):
    return ResidualNetwork((3, 4, 6, 3), 64, classes)


def small(classes=5):
    return ResidualNetwork((1, 2, 1, 1), 8, classes)


def test_resnet34_has_torchvisions_parameters():
    with torch.device("meta"):
        model = resnet34()
    assert count(model) == 21_797_672
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(shapes) == 218  # of torchvision's state dict
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer1.0.conv1.weight"] == (64, 64, 3, 3)
    assert shapes["layer3.5.bn2.running_var"] == (256,)
    assert shapes["layer4.0.downsample.0.weight"] == (512, 256, 1, 1)
    assert shapes["fc.weight"] == (1000, 512)
    assert "layer1.0.downsample.0.weight" not in shapes


def test_resnet34_has_34_layers_with_weights_on_its_main_path():
    with torch.device("meta"):
        model = resnet34(10)
    weights = [name for name, value in model.named_parameters() if value.dim() > 1 and "downsample" not in name]
    assert len(weights) == 34


def test_resolution_halves_five_times():
    model = small().eval()
    seen = []
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        model.get_submodule(stage).register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape[1:])))
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    assert seen == [(8, 16, 16), (16, 8, 8), (32, 4, 4), (64, 2, 2)]


def test_a_block_adds_its_input():
    block = small().get_submodule("layer1.0").eval()
    torch.nn.init.zeros_(block.conv2.weight)
    images = torch.rand(2, 8, 6, 6)
    torch.testing.assert_close(block(images), images)


def test_the_start_repeats_by_its_generator_and_resets_batch_norm():
    one, other = small(), small()
    one.bn1.running_mean.fill_(3)
    torch.nn.init.constant_(one.bn1.weight, 7)
    for model in (one, other):
        initialize_(model, torch.Generator().manual_seed(4))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert not torch.equal(one.fc.weight, initialize_(other, torch.Generator().manual_seed(5)).fc.weight)


@pytest.mark.parametrize(("name", "deviation"), [("conv1", math.sqrt(2 / (64 * 49))), ("fc", math.sqrt(1 / 512 / 3))])
def test_the_start_has_the_usual_scale(name, deviation):
    model = resnet34(1000)
    assert model.get_submodule(name).weight.std().item() == pytest.approx(deviation, rel=0.05)

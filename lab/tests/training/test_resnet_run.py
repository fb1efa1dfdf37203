"""One run of a residual network: what gets a basis, and how it ends."""

from __future__ import annotations

import math

import pytest
import torch

import egop
from egop_lab.data import images
from egop_lab.methods import RESNET as METHODS
from egop_lab.training.resnet import Run
from fakes import image_folder

CPU = torch.device("cpu")
CONFIG = {"depths": [1], "width": 4, "seed": 0, "batch": 8, "crop": 16, "lr": 1e-3, "weight decay": 1e-4}
ADAMW, UPFRONT, *_ = METHODS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return images.load(image_folder(tmp_path_factory.mktemp("images")), side=20, crop=16, device=CPU)


def test_a_run_that_diverges_is_a_result(data):
    config = CONFIG | {"method": ADAMW, "lr": 1e30, "epochs": 4}
    found = Run(data, config, CPU)(progress=False)
    assert found["diverged"]
    assert len(found["validation loss"]) == 5
    assert math.isnan(found["validation loss"][-1])


def test_convolutions_and_the_head_get_a_shared_basis_from_enough_kernel_gradients(data):
    start = Run(data, CONFIG, CPU).make_setup()
    assert start.samples == 250
    assert start.period == 3
    optimizer = METHODS[UPFRONT](start)
    assert isinstance(optimizer, egop.ReparameterizedOptimizer)
    assert {change.kind for change in optimizer.basis.values()} == {"Shared"}
    assert set(optimizer.basis) == {"conv1.weight", "layer1.0.conv1.weight", "layer1.0.conv2.weight", "fc.weight"}
    assert optimizer.param_groups[0]["weight_decay"] == 1e-4

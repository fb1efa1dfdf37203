"""Problems, forms, probes and predictors of the study of prediction, small ones and planted gradients."""

from __future__ import annotations

import math

import pytest
import torch

from egop_lab.training import predictors as module
from egop_lab.training.prediction import EGOP, FIXED, FORMS, ORIGINAL, TWO_SIDED, Start, probed, step_times, trained
from egop_lab.training.predictors import Grams, _Hessian, _of_grams, predictors
from egop_lab.training.problems import PROBLEMS

CONFIG = {"problem": "quadratic-dense", "steps": 50, "looks": 25, "warm-up": 0.05, "decay": 0.4, "seed": 0}
SLOW = {"further-mlp", "further-gpt", "lora-mlp", "lora-gpt"}  # trained first


@pytest.mark.parametrize("id", [id for id in PROBLEMS if id not in SLOW])
def test_a_problem_is_made_by_its_seed(id):
    one, same, other = (PROBLEMS[id].make(seed) for seed in (3, 3, 4))
    losses = [task.loss(task.model, task.judged) for task in (one, same, other)]
    assert torch.isfinite(losses[0])
    assert losses[0] == losses[1] != losses[2]
    one.loss(one.model, one.batches[0]).backward()
    assert all(parameter.grad is not None for parameter in one.model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        assert one.loss(one.model, one.judged) == pytest.approx(float(losses[0]), rel=1e-5)


def test_adapters_begin_where_the_trained_network_is():
    whole, adapted = (PROBLEMS[id].make(0) for id in ("further-mlp", "lora-mlp"))
    losses = [task.loss(task.model, task.judged).item() for task in (whole, adapted)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    trained = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[1] for name in trained} == {"down", "up"}


def test_what_gets_a_basis():
    assert Start("quadratic-axes", 0).weights == ["weight"]
    assert Start("mlp-digits", 0).weights == ["0.weight"]  # not the head
    assert Start("bigrams", 0).weights == ["table.weight"]  # an embedding, since there is nothing else


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains(form):
    result = trained(CONFIG | {"method": form, "lr": 3.2e-2})
    assert len(result["loss"]) == 26
    assert result["loss"][-1] < 0.5 * result["loss"][0]
    assert result == trained(CONFIG | {"method": form, "lr": 3.2e-2})


def test_a_run_that_diverges_is_recorded_as_one():
    result = trained(CONFIG | {"problem": "sensing", "method": TWO_SIDED, "lr": 1e30})
    assert len(result["loss"]) == 26
    assert math.isnan(result["loss"][-1])


def test_dense_eigenvectors_are_where_a_basis_helps():
    last = {form: trained(CONFIG | {"method": form, "lr": 3.2e-2})["loss"][-1] for form in (ORIGINAL, FIXED)}
    assert last[FIXED] < 0.7 * last[ORIGINAL]


def test_probes_are_looked_at_twice():
    config = CONFIG | {"steps": 4, "method": EGOP, "lr": 1e-2}
    assert len(probed(config)["loss"]) == 3


def test_every_form_is_timed():
    times = step_times("quadratic-axes", 0, rounds=1, warm=1, timed=2)
    assert set(times) == set(FORMS)
    assert all(entry["step"] > 0 for entry in times.values())
    assert [form for form in FORMS if times[form]["before"]] == [FIXED]


def test_all_predictors_are_numbers():
    numbers = predictors(Start("mlp-sums", 0), 8, 6, 8e-3)
    assert len(numbers) > 15
    assert all(math.isfinite(value) for value in numbers.values())


def planted(scales, rotated, draws=64):
    """Gradients of rank one whose inputs have a spectrum, along axes or not."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(draws, 1, len(scales), generator=generator, dtype=torch.float64) * scales
    if rotated:
        inputs = inputs @ torch.linalg.qr(torch.randn(len(scales), len(scales), generator=generator).double())[0]
    return inputs * torch.randn(draws, 12, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("draws", [4, 16, 256])
def test_white_noise_says_nothing_however_many_draws(draws):
    noise = torch.randn(draws, 12, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for gradients in (noise, planted(torch.ones(20), True, draws)):
        numbers = _of_grams({"weight": Grams.of(gradients)}, 0)
        assert all(value < 0.2 for name, value in numbers.items() if "inputs" in name), numbers


def test_gram_matrices_tell_a_rotated_spectrum_from_one_on_the_axes():
    scales = torch.arange(1, 21) ** -1.5
    on, off = (_of_grams({"weight": Grams.of(planted(scales, rotated))}, 0) for rotated in (False, True))
    for name in ("off-diagonal share, inputs", "roots, inputs"):
        assert abs(on[name]) < 0.15
        assert off[name] > 0.4


def test_a_draw_of_rank_one_counts_once():
    assert Grams.of(planted(torch.ones(20), True)).rank == pytest.approx(1)
    assert Grams.of(torch.eye(5).double().expand(3, 5, 5)).rank == pytest.approx(5)


@pytest.mark.parametrize(("id", "low", "high"), [("quadratic-axes", 0.9, 1.0), ("quadratic-dense", 0.0, 0.4)])
def test_the_share_of_curvature_on_axes(id, low, high):
    start = Start(id, 0)
    hessian = _Hessian(start)
    x = start.task.judged[0].double()
    exact = 2 * x.mT @ x / len(x)
    share = float(exact.diagonal().square().sum() / exact.square().sum())
    assert low <= share <= high
    assert hessian.on_axes(module._same, module._same) == pytest.approx(share, abs=0.1)
    direction = torch.randn(1, 48, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(hessian.product({"weight": direction})["weight"], direction @ exact, atol=1e-6)


def test_averages_count_entries():
    assert module._averaged([(1, {"a": 1.0}), (3, {"a": 5.0})]) == {"a": 4.0}

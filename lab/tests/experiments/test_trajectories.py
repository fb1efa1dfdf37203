import math

import pytest
import torch

from egop_lab.experiments.trajectories import Plane, TrajectoriesExperiment, smooth, tilt
from egop_lab.training.batched import EGOP, ORIGINAL
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from fakes import verdicts

SIZES = {"n": 20, "decay": 1.5, "samples": 10, "radius": 8.0}


class Toy(TrajectoriesExperiment):
    @property
    def settings(self):
        small = {"trials": 2, "steps": 30, "rates": [10.0, 30.0], "problem": SIZES}
        return {**super().settings, **small}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("toy") / "records.jsonl")
    Toy("quick", store).run(Context(progress=False))
    return store


def test_the_start_is_on_the_circle_and_the_minimum_is_one():
    plane = Plane([4, 5], **SIZES)
    assert plane.start()["theta"].norm(dim=-1).tolist() == pytest.approx([8.0, 8.0])
    assert plane.evaluate({"theta": plane.minimum[:, None]})["loss"].abs().max() < 1e-20


def test_the_hessian_is_the_one_of_autograd():
    plane = Plane([4], **SIZES)
    expected = torch.autograd.functional.hessian(
        lambda theta: plane.losses({"theta": theta[None, None]}, 0).sum(), plane.minimum[0]
    )
    assert torch.allclose(plane.hessian(0), expected, atol=1e-8)


def test_level_sets_have_one_height():
    plane = Plane([4, 5], **SIZES)
    ring = plane.level_set(1, 0.3, 9)
    heights = plane.single_trial(5).evaluate({"theta": ring[None]})["loss"]
    assert heights.flatten().tolist() == pytest.approx([0.3] * 9)
    assert torch.allclose(ring[0], ring[-1])


def test_tilt():
    angle = math.radians(20)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    hessian = turn @ torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)) @ turn.mT
    assert tilt(hessian, torch.eye(2, dtype=torch.float64)) == pytest.approx(20)
    assert tilt(hessian, turn) == pytest.approx(0, abs=1e-5)


def test_both_ways_begin_at_one_point_and_the_picture_shows_them(toy):
    (picture,) = Toy("quick", toy).pictures()
    original, turned, loss, sweep = picture.panels
    assert (original.aspect, turned.aspect) == ("equal", "equal")
    for panel in (original, turned):
        levels, way = panel.series
        assert levels.faint
        assert any(math.isnan(x) for x in levels.x)
        start, minimum = panel.marks
        assert (start.label, minimum.label) == ("start", "minimum")
        assert (way.x[0], way.median[0]) == pytest.approx((start.x, start.y), rel=1e-5)
        assert len(way.x) == 31
    assert [panel.series[1].egop for panel in (original, turned)] == [False, True]
    radius = math.hypot(original.series[1].x[0], original.series[1].median[0])
    assert radius == pytest.approx(math.hypot(turned.series[1].x[0], turned.series[1].median[0]), rel=1e-5)
    assert list(sweep.series[0].x) == [10.0, 30.0]
    assert len(loss.series) == 2


def test_level_sets_are_smooth_and_go_through_the_recorded_points():
    center = torch.tensor([1.0, -2.0], dtype=torch.float64)
    angles = torch.linspace(0, 2 * math.pi, 73, dtype=torch.float64)
    rays = torch.stack([angles.cos(), angles.sin()], dim=-1)
    quadratic = torch.tensor([[30.0, 4.0], [4.0, 1.0]], dtype=torch.float64)
    ring = center + rays / (rays @ quadratic * rays).sum(-1, keepdim=True).sqrt()  # an ellipse
    found = smooth(ring, center)
    assert len(found) == 721
    torch.testing.assert_close(found[::10], ring)
    offsets = found - center
    torch.testing.assert_close((offsets @ quadratic * offsets).sum(-1), torch.ones(721, dtype=torch.float64))


def test_the_real_runs_differ_while_sgd_does_not(toy):
    found = verdicts(Toy("quick", toy))
    assert set(found) == {"differ", "aligned", "solved", "SGD-same"}
    assert (found["differ"], found["SGD-same"]) == ("holds", "holds")


def changed(store, path, change):
    other = Store(path)
    other.add(*(Record(run.config, {**run.result, **change(run.config, run.result)}) for run in store))
    return other


def test_the_claims_can_come_out_both_ways(toy, tmp_path):
    originals = {
        run.config["seed"]: run.result
        for run in toy
        if run.config.get("optimizer") == "Adagrad" and run.config["record every"] == 1
        and run.config["coordinates"] == ORIGINAL
    }  # fmt: skip

    def failing(config, result):
        if config.get("part") == "geometry":
            return {"tilt": {ORIGINAL: 5.0, EGOP: 30.0}}
        if config["optimizer"] == "Adagrad" and config["record every"] == 1 and config["coordinates"] == EGOP:
            return originals[config["seed"]]
        return {"loss": [*result["loss"][:-1], 1e-3]}

    def holding(config, result):
        if config.get("part") == "geometry":
            return {"tilt": {ORIGINAL: 30.0, EGOP: 2.0}}
        return {"loss": [*result["loss"][:-1], 1e-12]}

    fails = verdicts(Toy("quick", changed(toy, tmp_path / "fails.jsonl", failing)))
    assert {name: found for name, found in fails.items() if found != "holds"} == dict.fromkeys(
        ("differ", "aligned", "solved"), "does not hold"
    )
    assert set(verdicts(Toy("quick", changed(toy, tmp_path / "holds.jsonl", holding))).values()) == {"holds"}


def test_nothing_is_done_twice(toy):
    before = toy.path.read_bytes()
    Toy("quick", toy).run(Context(progress=False))
    assert toy.path.read_bytes() == before

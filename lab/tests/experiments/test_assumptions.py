import math

import pytest
import torch

from egop_lab.experiments import assumptions
from egop_lab.experiments.assumptions import AssumptionsExperiment, mean_ratio, rank_correlation, share_of_steps
from egop_lab.training.records import Record, Store
from fakes import verdicts


def faked(tmp_path, monkeypatch, ratios=(0.1, 0.2, 0.3), shares=(0.2, 0.3, 0.9), dense=1.0, two=0.9):
    """Return the experiment with made-up measurements of three problems."""
    monkeypatch.setattr(AssumptionsExperiment, "_problems", lambda self: ["a", "b", "c"])
    found = dict(zip("abc", shares, strict=True))
    monkeypatch.setattr(AssumptionsExperiment, "_share_of_steps", lambda self, problem, optimizer: found[problem])
    store = Store(tmp_path / "assumptions.jsonl")
    one = AssumptionsExperiment("quick", store)
    values = dict(zip("abc", ratios, strict=True))
    likeness = {f"{name} of {who}": value for name in ("cosine", "alignment")
                for who, value in (("one", 0.95), ("two", two), ("random", 0.1))}  # fmt: skip
    for config in [config for configs in one.configs().values() for config in configs]:
        block = {"dimension": 2.0, "stable rank": 1.0, "density": 0.5, "ratio": values.get(config.get("problem"), 0.0)}
        store.add(Record(config, {"blocks": {"w": block}, "share": dense, "mean": 0.63, **likeness}))
    return one


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({}, set()),
        ({"shares": (0.9, 0.3, 0.2)}, {"ratio"}),
        ({"shares": (0.2, math.inf, 0.3)}, set()),
        ({"dense": 0.9}, {"random-density"}),
        ({"two": 0.5}, {"filters", "filters-trained"}),
    ],
)
def test_each_rule_can_fail(tmp_path, monkeypatch, changed, failing):
    one = faked(tmp_path, monkeypatch, **changed)
    assert {claim for claim, verdict in verdicts(one).items() if verdict != "holds"} == failing
    ratios, dense = one.tables()
    assert [len(ratios.rows), len(dense.rows)] == [3, 4]


def test_random_directions_are_denser_than_axes():
    found = assumptions._measure_density({"dimension": 400, "directions": 50})
    assert found["mean"] == pytest.approx(2 / math.pi, abs=0.01)
    assert found["share"] > 0.9


def test_filters_are_alike_before_training_and_unlike_a_rotated_one():
    config = {"trained": False, "gradients": 400, "epochs": 0, "leading directions": 10}
    found = assumptions._measure_filters(config)
    assert found["cosine of two"] > found["cosine of random"] + 0.1
    assert found["alignment of two"] > 3 * found["alignment of random"]
    assert assumptions._align(torch.eye(4), torch.eye(4), 4) == pytest.approx(1)


def test_the_share_of_steps_is_to_the_end_of_the_original():
    assert share_of_steps([1, 0.5, 0.4, 0.3, 0.2], [1, 0.3, 0.2, 0.1, 0.1], 0.0) == 0.5
    assert share_of_steps([1, 0.5, 0.2], [1, 0.5, 0.3], 0.0) == math.inf
    assert share_of_steps([1, 1e-9, 1e-12], [1, 1e-9, 1e-10], 1e-9) == 1.0, "below the floor nothing is compared"


def test_ratios_are_weighted_by_dimension_and_ranks_are_spearmans():
    blocks = {"a": {"ratio": 0.1, "dimension": 3.0}, "b": {"ratio": 0.5, "dimension": 1.0}}
    assert mean_ratio(blocks) == pytest.approx(0.2)
    assert rank_correlation([1, 2, 3], [10, 20, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [1, 1, 2, math.inf]) == pytest.approx(0.9486833)


def test_the_blocks_of_a_problem_are_measured_from_its_own_basis():
    blocks = AssumptionsExperiment()._measure_blocks("convex, logistic", 0)
    assert [own["dimension"] for own in blocks.values()] == [3.0]
    (own,) = blocks.values()
    assert own["ratio"] == pytest.approx(own["stable rank"] / (3 * own["density"]))

import pytest
import torch

import egop
from egop_lab.experiments import sample_size
from egop_lab.experiments.digits import DigitsExperiment
from egop_lab.experiments.sample_size import SampleSizeExperiment
from egop_lab.training import digits
from egop_lab.training.batched import ORIGINAL, RANDOM
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from fakes import verdicts


def faked(tmp_path, ends, aligned):
    """Make up final losses for each kind of coordinates; original coordinates end at 1e-3."""
    one = SampleSizeExperiment("quick", Store(tmp_path / "sample-size.jsonl"))
    base = DigitsExperiment("quick", Store(tmp_path / "digits.jsonl"))
    for optimizer, lr in one.settings["rates"].items():
        for seed in range(2):
            config = {"optimizer": optimizer, "coordinates": ORIGINAL, "lr": lr, "seed": seed}
            base.store.add(Record(base.config(**config), {"loss": [1.0, 1e-3]}))
            for kind, end in ends.items():
                one.store.add(Record(one.config(**config | {"coordinates": kind}), {"final": end}))
    for kind in ends:
        for config in one._alignment_configs(kind):
            one.store.add(Record(config, {"alignment": aligned if kind != RANDOM else 0.02}))
    return one


@pytest.mark.parametrize(
    ("ends", "aligned", "failing"),
    [
        ((1e-5, 1e-5, 5e-4), 0.95, set()),
        ((1e-5, 1e-5, 5e-5), 0.95, {"Adam-random", "Adagrad-random"}),
        ((1e-5, 1e-5, 5e-4), 0.5, {"aligned"}),
        ((1e-5, 2e-3, 1e-3), 0.95, {"Adam-suffices", "Adagrad-suffices", "Adam-random", "Adagrad-random"}),
    ],
)
def test_each_rule_can_fail(tmp_path, ends, aligned, failing):
    kinds = ("M = 0.25 d", "M = 1 d", RANDOM)
    one = faked(tmp_path, dict(zip(kinds, ends, strict=True)), aligned)
    assert {claim for claim, verdict in verdicts(one).items() if verdict != "holds"} == failing
    (table,) = one.tables()
    assert [row[0] for row in table.rows] == [ORIGINAL, *kinds]
    (picture,) = one.pictures()
    assert list(picture.panels[0].series[0].x) == [0.25, 1.0]


class Toy(SampleSizeExperiment):
    @property
    def settings(self):
        return super().settings | {"epochs": 1, "directions": 5}


def test_more_gradients_align_better_and_a_random_basis_hardly_at_all(tmp_path, monkeypatch):
    small = torch.nn.Sequential(torch.nn.Linear(64, 3), torch.nn.ReLU(), torch.nn.Linear(3, 10))
    monkeypatch.setattr(digits, "digits_network", lambda: small)
    sample_size._find_bases.cache_clear()
    store = Store(tmp_path / "sample-size.jsonl")
    Toy("quick", store).run(Context(progress=False))
    few, many, random = Toy("quick", store)._alignments().values()
    assert random < 0.2 < few < many <= 1 + 1e-6
    assert len(Toy("quick", store).records(optimizer="Adam")) == 3 * 2
    before = len(store)
    Toy("quick", store).run(Context(progress=False))
    assert len(store) == before, "finished runs are not repeated"


def test_a_share_decides_the_number_of_gradients(monkeypatch):
    monkeypatch.setattr(digits, "digits_network", lambda: torch.nn.Sequential(torch.nn.Linear(64, 10)))
    assert [digits.estimate(0, share).spectrum["0.weight"].samples for share in (1.0, 0.1)] == [650, 65]
    assert isinstance(digits.estimate(0), egop.Basis)

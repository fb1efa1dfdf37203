import numpy as np
import pytest
import torch

from egop_lab.data.batches import DataSet, Split
from egop_lab.data.missing import MissingDataError
from egop_lab.experiments import layer_spectra
from egop_lab.experiments.layer_spectra import NORMAL, LayerSpectraExperiment
from egop_lab.models.small import perceptron
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from egop_lab.training.spectra import subsample
from fakes import verdicts


def layer(size, decades):
    values = 10.0 ** (-decades * np.arange(size) / size)
    return {**subsample(list(values), leading=50), "stable rank": float(np.sqrt(values).sum())}


def judged(tmp_path, digits=(8, 2), fashion=(8, 2), as_digits=None):
    return verdicts(faked(tmp_path, digits, fashion, as_digits))


def faked(tmp_path, digits=(8, 2), fashion=(8, 2), as_digits=None):
    store = Store(tmp_path / "records.jsonl")
    experiment = LayerSpectraExperiment("quick", store)
    sizes = {"digits": (2048, 320), "fashion": (3920, 80)}
    for config in experiment._configs():
        data = config["data"]
        decades = digits if data == "digits" else fashion if "rho" in config else as_digits or fashion
        pair = [layer(size, each) for size, each in zip(sizes[data], decades, strict=True)]
        store.add(Record(config, dict(zip(("0.weight", "2.weight"), pair, strict=True))))
    return experiment


def test_another_initialisation_of_fashion_mnist_stands_beside_its_own(tmp_path):
    experiment = faked(tmp_path, fashion=(4, 2), as_digits=(8, 2))
    similar = experiment.judge()[-1]
    assert similar.verdict == "does not hold"
    assert [other.verdict for other in similar.alternatives] == ["holds"]


def test_claims_hold_where_the_first_layer_decays_faster(tmp_path):
    assert judged(tmp_path) == {"digits": "holds", "fashion": "holds", "similar": "holds"}


@pytest.mark.parametrize(
    ("decades", "failing"),
    [
        ({"digits": (2, 8), "fashion": (2, 8)}, {"digits", "fashion"}),
        ({"fashion": (8, 9)}, {"fashion"}),
        ({"fashion": (4, 2)}, {"similar"}),
    ],
)
def test_each_claim_fails_where_the_spectra_say_so(tmp_path, decades, failing):
    found = judged(tmp_path, **decades)
    assert {claim for claim, verdict in found.items() if verdict == "does not hold"} == failing


class Toy(LayerSpectraExperiment):
    @property
    def settings(self):
        return super().settings | {"samples per dimension": 0.01}


def clothes(folder):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 10
    split = Split(torch.rand(400, 784, generator=generator), labels)
    return DataSet(split, split, split)


def test_a_toy_run_has_two_layers_of_two_networks(tmp_path, monkeypatch):
    small = torch.nn.Sequential(torch.nn.Linear(196, 2), torch.nn.ReLU(), torch.nn.Linear(2, 4))
    problem = layer_spectra._load_problem
    monkeypatch.setattr(layer_spectra, "fashion_mnist", clothes)
    monkeypatch.setattr(layer_spectra, "fashion_folder", lambda folder: "a folder")
    monkeypatch.setattr(layer_spectra, "digits_network", lambda: perceptron(64, 4, 10))
    monkeypatch.setattr(
        layer_spectra,
        "_load_problem",
        lambda data, context: (small, problem(data, context)[1]) if data == "fashion" else problem(data, context),
    )
    store, said = Store(tmp_path / "records.jsonl"), []
    Toy("quick", store).run(Context(progress=False, say=said.append))
    assert {line.partition(": ")[0] for line in said} == {"images"}
    assert [record.config["data"] for record in store] == ["digits", "fashion", "fashion"]
    sizes = [[layer["dimension"] for layer in record.result.values()] for record in store]
    assert sizes == [[256, 40], [392, 8], [392, 8]]
    assert [record.config.get("rho") for record in store] == [None, None, NORMAL]
    assert {claim.id for claim in Toy("quick", store).judge()} == {
        "layer-spectra/digits",
        "layer-spectra/fashion",
        "layer-spectra/similar",
    }
    (picture,) = Toy("quick", store).pictures()
    assert [panel.title.split(", ")[1] for panel in picture.panels] == ["first layer", "second layer"] * 2
    assert [len(panel.series) for panel in picture.panels] == [1, 1, 2, 2]


def test_without_fashion_mnist_the_digits_are_kept_and_judged(tmp_path, monkeypatch):
    def missing(folder):
        raise MissingDataError("not there")

    monkeypatch.setattr(layer_spectra, "fashion_mnist", missing)
    monkeypatch.setattr(layer_spectra, "fashion_folder", lambda folder: "a folder")
    monkeypatch.setattr(
        layer_spectra,
        "measure",
        lambda config, context: (
            layer_spectra._load_problem(config["data"], context)
            and {name: layer(320, decades) for name, decades in (("0.weight", 8), ("2.weight", 2))}
        ),
    )
    store = Store(tmp_path / "records.jsonl")
    with pytest.raises(MissingDataError):
        Toy("quick", store).run(Context(progress=False))
    assert [record.config["data"] for record in store] == ["digits"]
    assert verdicts(Toy("quick", store)) == {"digits": "holds"}

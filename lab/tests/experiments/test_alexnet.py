import pytest
import torch
from torch import nn

from egop_lab.experiments.alexnet import METHODS, AlexNetExperiment
from egop_lab.models.alexnet import alexnet
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from egop_lab.training.tuning import TUNING
from fakes import image_folder, verdicts


def test_the_network_is_torchvisions():
    with torch.device("meta"):
        model = alexnet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 61_100_840
    kernels = [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Conv2d)]
    assert kernels == [(64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)]
    assert alexnet(2, 8, 5)(torch.zeros(3, 3, 64, 64)).shape == (3, 5)


class Toy(AlexNetExperiment):
    @property
    def settings(self):
        small = {"rates": [1e-3], "epochs": 1, "tuning epochs": 1, "batch": 8, "side": 66, "crop": 64}
        return super().settings | small | {"width": 25, "hidden": 4, "weight decay": 10.0, "images": [16, 8]}


def test_a_toy_run_has_every_method_from_one_start(tmp_path):
    store, context = Store(tmp_path / "records.jsonl"), Context(progress=False, data=image_folder(tmp_path / "images"))
    Toy("quick", store).run(context)
    assert len(store) == 2 * len(METHODS)
    runs = Toy("quick", store)._reported_runs()
    assert len({own[0].result["loss"][0] for own in runs.values()}) == 1
    assert len({own[0].result["loss"][1] for own in runs.values()}) == len(METHODS)
    assert len(Toy("quick", store).tables()[0].rows) == len(METHODS)
    assert set(verdicts(Toy("quick", store)).values()) == {"cannot be judged"}, "one trial of a small version"


@pytest.mark.parametrize(
    ("ends", "failing"),
    [
        ((1.0, 1.0, 0.5, 0.9), set()),
        ((0.4, 1.0, 0.5, 0.9), {"Adam"}),
        ((1.0, 1.0, 0.5, 0.6), {"random"}),
        ((1.0, 0.4, 0.5, 0.9), {"AdamW", "random"}),
    ],
)
def test_each_rule_can_fail(tmp_path, ends, failing):
    store = Store(tmp_path / "records.jsonl")
    one = AlexNetExperiment("full", store)
    for method, end in zip(METHODS, ends, strict=True):
        for lr in one.settings["rates"]:
            for seed, epochs in ((TUNING, 10), (0, 30), (1, 30), (2, 30)):
                config = one._config(method, lr, epochs, seed)
                store.add(Record(config, {"training loss": [2.3, end], "accuracy": [0.1, 0.5], "loss": [2.3, end]}))
    assert {claim for claim, verdict in verdicts(one).items() if verdict != "holds"} == failing

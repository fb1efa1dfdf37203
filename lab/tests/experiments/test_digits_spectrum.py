import numpy as np
import pytest

from egop_lab.experiments import digits_spectrum
from egop_lab.experiments.digits_spectrum import DigitsDensityExperiment, DigitsSpectrumExperiment
from egop_lab.models.small import perceptron
from egop_lab.training.context import Context
from egop_lab.training.records import Record, Store
from egop_lab.training.spectra import subsample
from fakes import verdicts

D = 2410
INDEX = np.arange(1, D + 1)
SHELVES = np.where(INDEX <= 41, 1.0, 0.25)


def spectrum(rate=12.0, shelf=SHELVES):
    """Return eigenvalues that decay exponentially over some decades, with a shelf."""
    return shelf * 10.0 ** (-rate * INDEX / D)


def results(**changed):
    values = {
        "N(0, 1²)": spectrum(),
        "N(0, 0.1²)": spectrum(13.0),
        "N(0, 10²)": spectrum(),
        "initialisation": spectrum(12.5),
    }
    return {
        rho: {**subsample(list(v)), "stable rank": float(np.sqrt(v / v[0]).sum())}
        for rho, v in (values | changed).items()
    }


def judged(tmp_path, results):
    store = Store(tmp_path / "digits-spectrum.jsonl")
    experiment = DigitsSpectrumExperiment("quick", store)
    store.add(*(Record(config, results[config["rho"]]) for config in experiment.configs()))
    return verdicts(experiment)


def test_all_claims_hold_where_spectra_are_as_the_paper_says(tmp_path):
    assert set(judged(tmp_path, results()).values()) == {"holds"}


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        ("exponential", {"N(0, 1²)": INDEX**-2.0}),
        ("robust", {"N(0, 10²)": spectrum(0.4)}),
        ("initialisation", {"initialisation": spectrum(3.0)}),
        ("shelf", {"N(0, 0.1²)": spectrum(shelf=np.where(INDEX <= 60, 1.0, 0.25))}),
        ("shelf", {rho: spectrum(shelf=np.ones(D)) for rho in results()}),
    ],
)
def test_each_claim_fails_where_the_spectra_say_so(tmp_path, claim, changed):
    assert judged(tmp_path, results(**changed))[claim] == "does not hold"


def test_what_is_kept_of_a_spectrum_has_the_leading_ones_and_is_small():
    kept = subsample(list(spectrum()))
    assert kept["index"][:101] == list(range(1, 102))
    assert kept["index"][-1] == D == kept["dimension"]
    assert len(kept["index"]) < 310
    assert all(value == spectrum()[k - 1] for k, value in zip(kept["index"], kept["eigenvalues"], strict=True))
    assert set(kept["even"]) <= set(kept["index"])


class Toy(DigitsSpectrumExperiment):
    @property
    def settings(self):
        return super().settings | {"samples per dimension": 0.05, "scales": [1.0]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("spectrum") / "digits-spectrum.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits_spectrum, "digits_network", lambda: perceptron(64, 4, 10))
        Toy("quick", Store(path)).run(Context(progress=False))
    return path


def test_a_toy_run_has_a_spectrum_for_each_distribution(run):
    store = Store(run)
    assert [record.config["rho"] for record in store] == ["N(0, 1²)", "initialisation"]
    for record in store:
        values = record.result["eigenvalues"]
        assert values == sorted(values, reverse=True)
        assert record.result["samples"] == 16
        assert len(record.result["density"]) == 100
    assert len(Toy("quick", store).judge()) == 4
    pictures = Toy("quick", store).pictures()
    assert [len(panel.series) for picture in pictures for panel in picture.panels] == [1, 1, 2, 2]
    assert pictures[0].panels[0].series[0].median[0] == 1


def test_a_finished_run_is_not_done_again(run, monkeypatch):
    monkeypatch.setattr("egop_lab.experiments.digits_spectrum.measure", lambda *_: pytest.fail("done again"))
    Toy("quick", Store(run)).run(Context(progress=False))


def test_density_takes_the_run_of_the_spectrum(run, monkeypatch):
    monkeypatch.setattr(digits_spectrum, "DigitsSpectrumExperiment", Toy)
    monkeypatch.setattr(digits_spectrum, "measure", lambda *_: pytest.fail("done again"))
    store = Store(run.with_name("digits-density.jsonl"))
    DigitsDensityExperiment("quick", store).run(Context(progress=False))
    (record,) = store
    assert record.config["experiment"] == "digits-density"
    assert record.result["density"] == next(iter(Store(run))).result["density"]
    ((panel,),) = [picture.panels for picture in DigitsDensityExperiment("quick", store).pictures()]
    assert panel.horizontal["1/d"] == pytest.approx(1 / 310)
    assert len(panel.series[0].x) == 100


def densities(tmp_path, values):
    store = Store(tmp_path / "digits-density.jsonl")
    experiment = DigitsDensityExperiment("quick", store)
    store.add(Record(experiment.config(), {"density": values, "dimension": D}))
    return verdicts(experiment)


@pytest.mark.parametrize(
    ("values", "failing"),
    [
        ([0.6] * 5 + [0.1] * 95, set()),
        ([0.4] * 5 + [0.1] * 95, {"first"}),
        ([0.6] * 2 + [0.1] * 98, {"several"}),
        ([0.6] * 99 + [2 / D], {"all"}),
    ],
)
def test_claims_about_density_come_out_both_ways(tmp_path, values, failing):
    assert {claim for claim, verdict in densities(tmp_path, values).items() if verdict != "holds"} == failing


def test_density_measures_by_itself_where_there_is_no_spectrum(tmp_path, monkeypatch):
    result = {"density": [0.6], "dimension": D, "samples": 3, "stable rank": 2.0, "eigenvalues": [1.0]}
    monkeypatch.setattr(digits_spectrum, "measure", lambda config, device: result)
    store = Store(tmp_path / "digits-density.jsonl")
    DigitsDensityExperiment("quick", store).run(Context(progress=False))
    assert [record.result["density"] for record in store] == [[0.6]]

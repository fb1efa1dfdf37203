"""Whether M was enough: two bases from half of the draws each, compared."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file

import cases
import egop
from egop.basis.spectrum import compare
from egop.estimation import chunks

EIGEN = [each for each in cases.STRUCTURES if not isinstance(each, (egop.Identity, egop.extras.RandomRotation))]


@pytest.mark.parametrize("structure", EIGEN, ids=str)
def test_it_compares_the_bases_of_the_even_and_the_odd_draws(structure):
    basis = cases.estimate(cases.MLP.objective(), structure=structure, samples=21, stability=True)
    gradients = cases.sample(cases.MLP.objective(), egop.Initialization(), 21)
    for name, change in basis.items():
        halves = [structure.accumulator(change.block) for _ in range(2)]
        for index, half in enumerate(halves):
            half.add([gradients[each][index::2] for each in change.block.parameters])
        expected = compare(*(half.eigenbases() for half in halves)).stability
        assert basis.spectrum[name].stability == pytest.approx(expected, abs=1e-6)
        assert 0 <= expected <= 1


@pytest.mark.parametrize("structure", cases.STRUCTURES, ids=str)
def test_the_basis_itself_is_the_same_with_and_without(structure):
    with_it, without = (
        cases.estimate(cases.MLP.objective(), structure=structure, samples=30, stability=stability)
        for stability in (True, False)
    )
    randomized = isinstance(structure, (egop.Auxiliary, egop.Reduced))  # its start meets the rows in another order
    for name, spectrum in without.spectrum.items():
        assert spectrum.stability is None
        found = with_it.spectrum[name]
        assert found.samples == spectrum.samples
        top = spectrum.eigenvalues[0].item()
        torch.testing.assert_close(
            found.eigenvalues, spectrum.eigenvalues, rtol=5e-3 if randomized else 1e-6, atol=1e-9 * top
        )
    assert list(with_it) == list(without)


def test_it_does_not_depend_on_the_chunks(monkeypatch):
    found = []
    for points in (256, 7, 1):
        monkeypatch.setattr(chunks, "CHUNK_POINTS", points)
        basis = cases.estimate(cases.MLP.objective(), samples=20, stability=True)
        found.append([spectrum.stability for spectrum in basis.spectrum.values()])
    assert found[1] == pytest.approx(found[0], abs=1e-9)
    assert found[2] == pytest.approx(found[0], abs=1e-9)


def test_it_grows_with_the_number_of_samples():
    scales = torch.arange(1, 21).double() ** -1.0

    def stability(samples):
        objective = egop.Objective.from_function(
            lambda theta: (scales * theta.square()).sum(), {"theta": torch.zeros(20).double()}
        )
        return (
            cases.estimate(objective, rho=egop.Gaussian(), samples=samples, stability=True).spectrum["theta"].stability
        )

    few, many = stability(10), stability(4000)
    assert few < 0.8
    assert many > 0.95


def test_one_sample_has_no_halves():
    assert cases.estimate(cases.MLP.objective(), samples=1, stability=True).spectrum["0.weight"].stability is None


def test_it_is_printed_where_it_is_known():
    assert "stability" in str(cases.estimate(cases.MLP.objective(), stability=True))
    assert "stability" not in str(cases.estimate(cases.MLP.objective()))


def test_it_is_saved_and_loaded(tmp_path):
    basis = cases.estimate(cases.MLP.objective(), stability=True)
    basis.save(tmp_path / "basis.safetensors")
    loaded = egop.Basis.load(tmp_path / "basis.safetensors")
    for name, spectrum in basis.spectrum.items():
        assert loaded.spectrum[name].stability == spectrum.stability is not None


def test_a_file_from_before_there_was_any_is_read(tmp_path):
    path = tmp_path / "basis.safetensors"
    cases.estimate(cases.MLP.objective()).save(path)
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["egop"])
    for block in content["blocks"]:
        for key in ("held", "chance", "reliability", "surprise"):
            del block[key]
        block["samples"] = block.pop("draws")
        block["stability"] = 0.5  # of another kind
    save_file(load_file(path), tmp_path / "old.safetensors", metadata={"egop": json.dumps(content)})
    assert egop.Basis.load(tmp_path / "old.safetensors").spectrum["0.weight"].stability is None

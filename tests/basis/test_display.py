"""How bases, plans and spectra are shown: as a line, a table and a plot."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import cases
import egop
from egop.basis import format_blocks, make_plan
from egop.basis.structures.shared import SharedChange
from egop.plots import plot_spectra


def spectrum(*eigenvalues, **known):
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    return egop.Spectrum(values, torch.ones_like(values), 10, **known)


def shared(name, *shape):
    block = cases.block(name, **{name: shape})
    return SharedChange(block, {"basis": torch.eye(shape[1], dtype=block.dtype)})


def test_repr_of_a_basis_is_one_line():
    changes = [shared("a", 3, 4), shared("b", 5, 2)]
    basis = egop.Basis(changes, unrotated={"c": "an embedding"})
    assert repr(basis) == "Basis(2 blocks: 2 Shared, 1 not rotated, 160 B)"
    assert repr(egop.Basis([])) == "Basis(0 blocks, 0 B)"


def test_repr_of_a_spectrum_is_a_summary():
    known = spectrum(4.0, 1.0, 0.0)
    assert repr(known) == "Spectrum(3 eigenvalues, stable rank 1.5, 10 draws)"
    few = repr(replace(known, reliability=0.1))
    assert "10 draws: too few, the stable rank is a lower bound" in few


def test_plan_prints_as_a_line_and_a_table():
    blocks = [cases.block("a", a=(3, 4)), cases.block("b", b=(5, 2))]
    plan = make_plan(blocks, {}, {"a": egop.Shared()}, 10**6)
    assert repr(plan) == "Plan(1 block, 1 not rotated)"
    assert "no pattern matches it" in str(plan)


def test_similar_blocks_share_a_row_if_there_are_many():
    few = [shared(f"layers.{k}.w", 3, 4) for k in range(12)]
    names = [line.split()[0] for line in format_blocks(few, {}, {}).splitlines()[2:14]]
    assert names == [change.block.name for change in few]
    spectra = {f"layers.{k}.w": spectrum(float(k + 1), 1.0, 1.0, 1.0) for k in range(13)}
    many = [*(shared(name, 3, 4) for name in spectra), shared("head", 5, 4)]
    _, _, row, head, *_ = format_blocks(many, spectra, {}).splitlines()
    assert row.startswith("layers.*.w (13 similar)")
    assert row.endswith("1.8–4.0 of 4")
    assert f"{13 * 128 / 1024:.1f} KiB" in row, "the bytes of all of them"
    assert head.startswith("head ")


def test_weights_that_are_not_rotated_come_last_with_the_reason():
    basis = egop.Basis([shared("a", 3, 4)], {"a": spectrum(4.0, 2.0, 1.0)}, unrotated={"b": "an embedding"})
    _, _, first, *_, last = str(basis).splitlines()
    assert first.endswith("of 3")
    assert last == "b is not rotated: an embedding"


def test_plot_has_a_line_per_spectrum_down_to_rounding():
    (axes,) = plot_spectra({"a": torch.tensor([4.0, 1.0, 4e-11]), "b": torch.zeros(2)}).axes
    (line,) = axes.lines
    assert line.get_label() == "a (3)"
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == [1.0, 0.25]
    with pytest.raises(ValueError, match="no spectrum to plot"):
        plot_spectra({"b": torch.zeros(1)})


def test_basis_and_spectrum_have_plots():
    known = spectrum(4.0, 1.0)
    for figure in (known.plot(), egop.Basis([shared("a", 3, 4)], {"a": known}).plot()):
        (axes,) = figure.axes
        assert axes.lines[0].get_ydata().tolist() == [1.0, 0.25]
    with pytest.raises(ValueError, match="no spectrum to plot"):
        egop.Basis([shared("a", 3, 4)]).plot()


def test_without_matplotlib_a_plot_says_what_to_install():
    script = (
        "import sys, torch; sys.modules['matplotlib'] = None\n"
        "import egop\n"
        "values = torch.ones(2).double()\n"
        "try:\n"
        "    egop.Spectrum(values, values, 1).plot()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.strip() == "Plots need matplotlib, which is not installed. Run: pip install 'egop[plot]'"

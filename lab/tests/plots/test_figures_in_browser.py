"""A saved picture in a real browser, where the reader wants light and where dark."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from egop_lab.plots.figures import draw_picture, save_figure
from egop_lab.plots.picture import Panel, Picture, Series

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=2000"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.parametrize(("scheme", "background"), [(0, 0x15171A), (1, 0xFEFEFE)], ids=["dark", "light"])
def test_an_svg_has_the_colours_that_the_reader_wants(tmp_path, scheme, background):
    series = [Series("Muon", (0, 1), (2.0, 1.0)), Series("EGOP", (0, 1), (2.0, 0.5))]
    picture, shot = tmp_path / "picture.svg", tmp_path / "shot.png"
    save_figure(draw_picture(Picture("picture", "", [Panel("Loss", "step", "loss", series)])), picture)
    page = tmp_path / "page.html"
    page.write_text(
        '<!DOCTYPE html><title>x</title><style>body { margin: 0 }</style><img src="picture.svg" width="800">'
    )
    settings = [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    subprocess.run(
        [CHROMIUM, *FLAGS, *settings, "--window-size=800,300", f"--screenshot={shot}", page.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    codes = (imread(shot)[..., :3] * 255).round().astype(int) @ [65536, 256, 1]
    values, counts = np.unique(codes, return_counts=True)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert max(found, key=lambda color: found[color]) == background
    line = 0xA58BE0 if scheme == 0 else 0x4B2991
    near = [code for code in found if all(abs((code >> s & 255) - (line >> s & 255)) < 90 for s in (0, 8, 16))]
    assert sum(found[code] for code in near) > 300, "the violet line is seen"

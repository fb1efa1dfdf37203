"""The report in a real browser: Debian's chromium, headless. Skipped, visibly, where there is none."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from egop_lab.experiments.base import Alternative, Judgement
from egop_lab.experiments.registry import experiment
from egop_lab.plots.picture import Panel, Picture, Series
from egop_lab.report import reproduction

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000", "--allow-file-access-from-files"),
]
WIDTHS = [400, 1300]
# Frames of the wanted widths, since windows have a smallest one; a link is followed, as a reader would.
FRAMES = "".join(f'<iframe src="report.html#resnet" style="width:{width}px;height:900px"></iframe>' for width in WIDTHS)
PROBE = """<script>addEventListener("load", () => {
  document.body.dataset.probe = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    const boxes = [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect());
    return [page.documentElement.scrollWidth - page.documentElement.clientWidth,
      boxes.length, Math.max(...boxes.map(box => box.right)),
      [...page.querySelectorAll("details.part")].filter(part => part.open).length,
      getComputedStyle(page.querySelector("figure")).backgroundColor].join("|");
  }).join(";");
})</script>"""


@pytest.mark.slow
def test_a_link_opens_its_part_and_figures_fit_in_the_pages_own_colours(tmp_path):
    series = [Series(name, [1, 2, 3], [1.0, 0.1, 0.01], method=name) for name in ("AdamW", "Muon", "SOAP")]
    panels = [Panel(title, "epoch", "loss", series) for title in ("One", "Two", "Three")]
    rows = tuple(
        Judgement(f"resnet/{name}", "A claim.", "holds", "1 and 2.", alternatives=(Alternative("r", "holds", "x"),))
        for name in "ab"
    )
    sections = [
        reproduction.Section(experiment(id), "full", rows, (Picture(id, "Caption.", panels),))
        for id in ("digits", "resnet", "advice")
    ]
    reproduction.write_html(sections, tmp_path / "report.html")
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><title>x</title><body>{FRAMES}{PROBE}</body>")
    frame = (tmp_path / "frame.html").as_uri()
    arguments = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1500,1000", "--dump-dom", frame]
    done = subprocess.run([CHROMIUM, *arguments], capture_output=True, text=True, timeout=120, check=True)
    found = done.stdout.split('data-probe="')[1].split('"')[0].split(";")
    for width, probe in zip(WIDTHS, found, strict=True):
        beyond, count, right, opened, background = probe.split("|")
        assert (beyond, count, opened) == ("0", "9", "1"), width
        assert 300 < float(right) <= width
        assert background == "rgba(0, 0, 0, 0)", "the page's own, light or dark"

"""The page in a real browser: Debian's chromium, headless. Skipped, visibly, where there is none."""

from __future__ import annotations

import shutil
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

import pages
from egop.diagnostics import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=2000"),
]
# Appended in the browser's copy only: what the page looks like from inside, written where --dump-dom shows it.
PROBE = """<script>
addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return [Math.round(box.left), Math.round(box.right), Math.round(box.width), Math.round(box.height)].join(",");
  });
  const wide = document.documentElement.scrollWidth;
  const loaded = performance.getEntriesByType("resource").length;
  const small = [...document.querySelectorAll("p, td, th, li, dd, figcaption, span.badge")]
    .filter(each => each.textContent && parseFloat(getComputedStyle(each).fontSize) < 12).length;
  document.body.dataset.probe = `svgs=${boxes.join(";")} wide=${wide} of ${innerWidth} loaded=${loaded} small=${small}`;
});
</script></body>"""


def chromium(tmp_path, *arguments):
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    # What pages print and break goes to the log as CONSOLE lines.
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout


@pytest.fixture
def path(tmp_path):
    slow = tuple(k**-0.5 for k in range(1, 301))
    long = pages.block("a.very.long.name.of.a.layer.with.many.parts.in_proj_weight", eigenvalues=slow, ratio=0.3)
    blocks = [pages.block(), long, pages.left()]
    return page.write(tmp_path, pages.diagnosis(*blocks), pages.race(), title="examples/mlp.py:factory", settings={})


def probed(path, tmp_path, widths):
    """What the page says about itself at each width: frames of these widths, since windows have a smallest one."""
    inside = tmp_path / "probed.html"
    inside.write_text(path.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    frame = tmp_path / "frame.html"
    style = "height:900px;border:0"
    frames = [f'<iframe src="probed.html" style="width:{width}px;{style}"></iframe>' for width in widths]
    frame.write_text(
        f"<!DOCTYPE html><title>x</title><body>{''.join(frames)}<script>addEventListener('load', () => "
        "document.body.dataset.probe = [...document.querySelectorAll('iframe')].map("
        "frame => frame.contentDocument.body.dataset.probe).join('|'))</script></body>"
    )
    dom = chromium(tmp_path, "--allow-file-access-from-files", "--window-size=1400,1000", "--dump-dom", frame.as_uri())
    for found in dom.split('data-probe="')[1].split('"')[0].split("|"):
        svgs, rest = found.removeprefix("svgs=").split(" ", 1)
        yield [[int(number) for number in box.split(",")] for box in svgs.split(";")], rest


def test_the_plots_are_inside_the_screen_and_nothing_is_wider_than_it(path, tmp_path):
    widths = [400, 1300]
    for width, (boxes, rest) in zip(widths, probed(path, tmp_path, widths), strict=True):
        assert len(boxes) == 2
        for left, right, wide, high in boxes:
            assert 0 <= left < right <= width
            assert wide >= 340
            assert high >= 240
        side_by_side = boxes[0][1] <= boxes[1][0]
        assert side_by_side == (width == 1300)
        assert rest == f"wide={width} of {width} loaded=0 small=0"


def test_what_a_page_breaks_would_be_noticed(tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text("<!DOCTYPE html><title>x</title><script>throw new Error('seen')</script>")
    with pytest.raises(AssertionError, match="CONSOLE"):
        chromium(tmp_path, "--dump-dom", broken.as_uri())


def colors_of(path):
    """How many pixels of each colour a picture has."""
    codes = (imread(path)[..., :3] * 255).round().astype(int) @ [65536, 256, 1]
    values, counts = np.unique(codes, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
@pytest.mark.parametrize("width", [400, 1300])
def test_a_screenshot_shows_the_lines_of_both_plots(path, tmp_path, width, scheme):
    shot = tmp_path / "shot.png"
    scheme_setting = f"--blink-settings=preferredColorScheme={scheme}"
    chromium(tmp_path, scheme_setting, f"--window-size={width},3400", f"--screenshot={shot}", path.as_uri())
    found = colors_of(shot)
    background = max(found, key=lambda color: found[color])
    assert background == (0xFFFFFF if scheme else 0x15171A)
    assert found[background] < 0.99 * sum(found.values())
    swatch = 3 * 30  # what the legend alone would show of a colour
    for line in (0x0072B2, 0xD55E00, 0x8A8A8A):  # a block's spectrum, the EGOP side and the original one
        assert found.get(line, 0) > 3 * swatch

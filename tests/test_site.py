"""The site as ``make docs`` has built it: links, names, the gallery; and in a browser. Skipped, visibly, without."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tomllib
import zlib
from html.parser import HTMLParser
from urllib.parse import unquote

import matplotlib.image
import pytest

from test_docs import DOCS, ROOT, SCRIPTS, public_names

SITE = ROOT / "build" / "docs"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = 390, 1280


def state():
    """Return why the site cannot be checked, or "" if it can."""
    if not (SITE / "index.html").exists():
        return "no site here: make docs"
    built = (SITE / "searchindex.js").stat().st_mtime  # what a build writes last
    sources = [path for path in DOCS.rglob("*") if path.suffix in {".md", ".py", ".js", ".css"}] + [ROOT / "README.md"]
    newer = [path for path in sources if "gallery-pages" not in path.parts and path.stat().st_mtime > built]
    return f"the site is older than {newer[0].relative_to(ROOT)}: make docs" if newer else ""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(state()), reason=state())]
PAGES = sorted(SITE.rglob("*.html"))


class Read(HTMLParser):
    """The links, the anchors and what is loaded of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.loaded = [], set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {value for key, value in attributes if key in ("id", "name") and value}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        self.loaded += [given[key] for key in ("src", "data") if given.get(key)]
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def read():
    return {path.resolve(): Read(path) for path in PAGES}


def test_every_link_and_anchor_of_every_page_leads_somewhere(read):
    assert len(read) > 50
    broken = []
    for path, page in read.items():
        for link in page.links:
            place, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", place):
                continue
            file = (path.parent / place).resolve() if place else path
            known = read[file].anchors if file in read else {anchor}
            if not file.exists() or (anchor and anchor not in known):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(read):
    loaded = {(path.name, each) for path, page in read.items() for each in page.loaded}
    assert {(page, each) for page, each in loaded if re.match(r"([a-z]+:)?//", each)} == set()
    missing = [(path, each) for path, page in read.items() for each in page.loaded
               if not each.startswith("data:") and not (path.parent / each.partition("?")[0]).exists()]  # fmt: skip
    assert missing == []
    for style in (SITE / "_static").rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", style.read_text(encoding="utf-8")), style


def test_every_public_name_has_an_entry_to_link_to():
    inventory = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = {line.split(" ", 1)[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert set(public_names()) - entries == set()


def test_the_search_knows_the_pages():
    index = (SITE / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    assert {"start", "why", "howto/learning-rate", "reference/optimizers", "reproduction/digits"} <= set(
        found["docnames"]
    )
    assert "egop" in found["terms"]


def test_every_page_links_the_paper_and_the_repository(read):
    for path, page in read.items():
        if "_static" not in path.parts:
            assert {PROJECT["urls"]["Paper"], PROJECT["urls"]["Repository"]} <= set(page.links), path.name


def test_the_front_page_shows_the_picture_of_the_readme(read):
    (image,) = re.findall(r"!\[.*\]\(docs/images/(.*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert f"_images/{image}" in read[(SITE / "index.html").resolve()].loaded


def test_no_page_loads_more_than_a_megabyte(read):
    """Count the page and its pictures; styles and scripts are the same on every page."""
    sizes = {
        path.name: path.stat().st_size + sum((path.parent / each).stat().st_size for each in set(page.loaded)
                                             if each.endswith((".svg", ".png")))
        for path, page in read.items()
    }  # fmt: skip
    assert {name: size for name, size in sizes.items() if size > 1_000_000} == {}


def test_pictures_are_loaded_lazily():
    pictures = [picture for path in PAGES for picture in re.findall("<img [^>]*_images/[^>]*>", path.read_text())]
    assert len(pictures) > 30
    assert all('loading="lazy"' in picture for picture in pictures)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_gallery_can_be_downloaded_as_notebooks(read, script):
    page = (SITE / "gallery-pages" / f"{script.stem}.html").resolve()
    (link,) = [link for link in read[page].links if link.endswith(".ipynb")]
    notebook = json.loads((page.parent / unquote(link)).read_text(encoding="utf-8"))
    code = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "import torch" in code


def test_the_gallery_ran_in_time():
    seconds = json.loads((SITE.parent / "gallery.json").read_text())  # of processor time, by the build
    assert {path.name for path in SCRIPTS} <= set(seconds)
    assert max(seconds.values()) < 10, seconds
    for path in SCRIPTS:
        assert list((SITE / "_images").glob(f"sphx_glr_{path.stem}_*.svg")), f"{path.name} draws nothing"


FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=60000"),
    "--allow-file-access-from-files",
]
# Opens pages in a frame of a width, one after the other (windows have a smallest width), and asks each a question.
FRAME = """<!DOCTYPE html><title>x</title><body><iframe style="width:WIDTHpx;height:900px;border:0"></iframe><script>
const frame = document.querySelector("iframe"), pages = PAGES, found = {};
const next = () => {
  const page = pages.pop();
  if (!page) { document.body.dataset.found = JSON.stringify(found); return; }
  frame.onload = () => {
    const document = frame.contentDocument, window = frame.contentWindow;
    setTimeout(() => { found[page] = QUESTION; next(); }, WAIT);
  };
  frame.src = page;
};
next();
</script></body>"""
SCROLL = """[document.documentElement.scrollWidth, document.body.scrollWidth,
  window.getComputedStyle(document.body).backgroundColor]"""
SLIDE = """(() => {
  const root = document.getElementById("rotation"), said = [];
  for (const angle of [0, 45]) {
    root.querySelector("input[type=range]").value = angle;
    root.querySelector("input[type=range]").dispatchEvent(new Event("input", { bubbles: true }));
    said.push(root.querySelector("output").textContent);
  }
  root.querySelector("input[value='Gradient descent']").click();
  said.push(root.querySelector("output").textContent);
  return [said, root.querySelectorAll("svg polyline").length];
})()"""


FOUND = """[...document.querySelectorAll("#search-results li a")].map(each => each.getAttribute("href"))"""


def asked(tmp_path, pages, question, width=DESKTOP, dark=False, wait=0):
    frame = tmp_path / "frame.html"
    filled = FRAME.replace("WIDTH", str(width)).replace(
        "PAGES", json.dumps([page if isinstance(page, str) else page.as_uri() for page in pages])
    )
    frame.write_text(filled.replace("QUESTION", question).replace("WAIT", str(wait)), encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000",
         f"--blink-settings=preferredColorScheme={1 - dark}", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(html.unescape(done.stdout.split('data-found="')[1].split('"')[0]))


# Pages side by side, as the page's own switch has them: "auto" is as the system is.
SHEETS = """<!DOCTYPE html><title>x</title><body style="margin:0;display:flex">FRAMES<script>
for (const frame of document.querySelectorAll("iframe"))
  frame.onload = () => { frame.contentDocument.body.dataset.theme = "THEME"; };
</script></body>"""


def white(tmp_path, pages, dark, theme):
    """Return the fraction of the rendered pages that is white or nearly white."""
    frame, picture = tmp_path / "sheets.html", tmp_path / "seen.png"
    frames = "".join(
        f'<iframe style="width:700px;height:2400px;border:0" src="{page.as_uri()}"></iframe>' for page in pages
    )
    frame.write_text(SHEETS.replace("FRAMES", frames).replace("THEME", theme), encoding="utf-8")
    subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={700 * len(pages)},2400",
         f"--blink-settings=preferredColorScheme={1 - dark}", f"--screenshot={picture}", frame.as_uri()],
        capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    return (matplotlib.image.imread(picture)[..., :3].min(-1) > 0.9).mean()


in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


@in_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_no_page_is_wider_than_the_screen(tmp_path, width, dark):
    found = asked(tmp_path, PAGES, SCROLL, width, dark)
    assert len(found) == len(PAGES)
    wide = {page: sizes for page, (*sizes, _) in found.items() if max(sizes) > width}
    assert wide == {}
    for *_, color in found.values():
        brightness = sum(int(part) for part in re.findall(r"\d+", color)[:3]) / 3
        assert brightness < 60 if dark else brightness > 200


@in_browser
@pytest.mark.parametrize(("dark", "theme"), [(True, "auto"), (False, "dark"), (True, "light")])
def test_pictures_are_dark_where_the_page_is(tmp_path, dark, theme):
    """Include the gallery's pictures, and pages that the reader has switched against the system's setting."""
    pages = [SITE / f"{name}.html" for name in ("gallery-pages/index", "gallery-pages/plot_8_transformer", "why")]
    part = white(tmp_path, pages, dark, theme)
    assert part > 0.85 if theme == "light" else part < 0.002


# The name of the table's second column, where it ends, and where the line of code that matters ends in its box.
FIRST_SCREEN = """(() => {
  const column = document.querySelector("article table th:nth-child(2)"), box = document.querySelector("article pre");
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), range = document.createRange();
  let end = 0, text = "";
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    text += node.textContent;
    const line = text.slice(text.lastIndexOf("\\n") + 1);
    if (line.startsWith("optimizer = ")) {
      range.selectNodeContents(node);
      end = Math.max(end, range.getBoundingClientRect().right);
    }
  }
  return [column.textContent, column.getBoundingClientRect().right, end, box.getBoundingClientRect().right];
})()"""


@in_browser
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_first_screen_shows_egop_and_the_line_of_code(tmp_path, width):
    ((name, column, line, box),) = asked(tmp_path, [SITE / "index.html"], FIRST_SCREEN, width).values()
    assert name == "EGOP"
    assert column <= width
    assert 0 < line <= box


CUT_OFF = """[...document.querySelectorAll("article .highlight-python pre")]
  .filter(each => each.scrollWidth > each.clientWidth).map(each => each.textContent)"""


@in_browser
def test_no_code_is_cut_off_on_the_first_pages(tmp_path):
    names = ("index", "start", "why", "howto/learning-rate", "howto/variants", "howto/parameters", "howto/cost")
    found = asked(tmp_path, [SITE / f"{name}.html" for name in names], CUT_OFF, DESKTOP)
    assert len(found) == len(names)
    assert {page: cut for page, cut in found.items() if cut} == {}


def test_numbers_of_a_table_do_not_break():
    for name in ("index", "results"):
        rows = re.findall(r"<td>.*?</td>", (SITE / f"{name}.html").read_text(encoding="utf-8"))
        assert any("±\N{NO-BREAK SPACE}0" in row for row in rows)
        assert not [row for row in rows if re.search(r"\d ±|± \d|\d steps", row)]


@in_browser
def test_every_picture_can_be_drawn(tmp_path):
    """Pictures are loaded lazily; here all of them are loaded."""
    eager = """[...document.images].map(each => { each.loading = "eager"; return each; })
      .filter(each => each.complete && !each.naturalWidth).map(each => each.src)"""
    found = asked(
        tmp_path, [SITE / "index.html", SITE / "why.html", SITE / "reproduction" / "digits.html"], eager, wait=500
    )
    assert all(not missing for missing in found.values()), found


@in_browser
def test_small_pictures_are_large_enough_to_be_read(tmp_path):
    widths = """[...document.querySelectorAll(".sphx-glr-thumbcontainer img")].map(each => each.clientWidth)"""
    for width in (PHONE, DESKTOP):
        (found,) = asked(tmp_path, [SITE / "gallery-pages" / "index.html"], widths, width).values()
        assert len(found) == len(SCRIPTS)
        assert min(found) >= 280


@in_browser
def test_the_slider_shows_that_adam_sees_the_angle_and_gradient_descent_does_not(tmp_path):
    ((said, lines),) = asked(tmp_path, [SITE / "why.html"], SLIDE).values()
    straight, turned, descent = [[int(steps) for steps in re.findall(r"(\d+) at", each)] for each in said]
    assert straight[0] == straight[1]
    assert turned[0] > 2 * turned[1]
    assert descent[0] == descent[1]
    assert lines >= 7


@in_browser
def test_a_search_finds_pages_without_a_server(tmp_path):
    queries = {"stable+rank": {"glossary.html", "why.html"}, "preregistered": {"reproduction.html"}}
    for query, pages in queries.items():  # the second word is only in the text of one page
        (results,) = asked(tmp_path, [f"{(SITE / 'search.html').as_uri()}?q={query}"], FOUND, wait=4000).values()
        assert pages <= {result.partition("#")[0].partition("?")[0] for result in results}


@in_browser
def test_what_is_too_wide_or_breaks_would_be_noticed(tmp_path):
    page = tmp_path / "wide.html"
    page.write_text("<!DOCTYPE html><title>x</title><body><div style='width:2000px'>x</div></body>")
    ((*sizes, _),) = asked(tmp_path, [page], SCROLL, PHONE).values()
    assert max(sizes) > PHONE
    page.write_text("<!DOCTYPE html><title>x</title><script>throw new Error('seen')</script>")
    with pytest.raises(AssertionError, match="CONSOLE"):
        asked(tmp_path, [page], SCROLL)

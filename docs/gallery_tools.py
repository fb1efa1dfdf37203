"""What the gallery does with a script: pictures to its page, and the time it took. A module that Sphinx can import."""

import json
import time
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst, matplotlib_scraper

from egop.runs import plotting

_SEEN: list[Figure] = []
_BEGAN: dict[str, float] = {}


def scraped(block: object, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Figures as SVG: those of pyplot, and those that egop's own ``plot`` methods return, unknown to pyplot."""
    rst = str(matplotlib_scraper(block, block_vars, gallery_conf, format="svg", bbox_inches="tight"))
    for figure in block_vars["example_globals"].values():
        if isinstance(figure, Figure) and not hasattr(figure, "number") and figure not in _SEEN:
            _SEEN.append(figure)
            path = Path(next(block_vars["image_path_iterator"])).with_suffix(".svg")
            figure.savefig(path, bbox_inches="tight")
            rst += figure_rst([path], gallery_conf["src_dir"])
    return rst


def styled(gallery_conf: dict[str, Any], name: str) -> None:
    """Give the pictures of a script the style of egop's own."""
    matplotlib.rcParams.update(plotting.STYLE)


def clocked(gallery_conf: dict[str, Any], name: str, when: str) -> None:
    """Note the seconds of processor time that a script takes, which do not depend on who else is computing."""
    if when == "before":
        _BEGAN[name] = time.process_time()
        return
    notes = Path(gallery_conf["src_dir"]).parent / "build" / "gallery.json"
    seconds = json.loads(notes.read_text()) if notes.exists() else {}
    notes.write_text(json.dumps(seconds | {Path(name).name: round(time.process_time() - _BEGAN[name], 2)}))

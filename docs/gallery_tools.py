"""What the gallery does with a script: pictures to its page, and the time it took. A module that Sphinx can import."""

import json
import time
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst

from egop_lab.plots.figures import STYLE, save_figure

_SEEN: list[Figure] = []
_BEGAN: dict[str, float] = {}


def scraped(block: object, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save all figures, including those of egop's ``plot`` methods, which pyplot does not know; light and dark."""
    figures = [plt.figure(number) for number in plt.get_fignums()]
    for figure in block_vars["example_globals"].values():
        if isinstance(figure, Figure) and not hasattr(figure, "number") and figure not in _SEEN:
            _SEEN.append(figure)
            figures.append(figure)
    rst = ""
    for figure in figures:
        path = Path(next(block_vars["image_path_iterator"])).with_suffix(".svg")
        save_figure(figure, path)
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        rst += figure_rst([path], gallery_conf["src_dir"], ", ".join(filter(None, titles)))
    plt.close("all")
    return rst


def styled(gallery_conf: dict[str, Any], name: str) -> None:
    """Give the pictures of a script the style of egop's own."""
    matplotlib.rcParams.update(STYLE | {"savefig.bbox": "tight"})


def clocked(gallery_conf: dict[str, Any], name: str, when: str) -> None:
    """Record the CPU time of a script, which does not depend on other load."""
    if when == "before":
        _BEGAN[name] = time.process_time()
        return
    notes = Path(gallery_conf["src_dir"]).parent / "build" / "gallery.json"
    seconds = json.loads(notes.read_text()) if notes.exists() else {}
    notes.write_text(json.dumps(seconds | {Path(name).name: round(time.process_time() - _BEGAN[name], 2)}))

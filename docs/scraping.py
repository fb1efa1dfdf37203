"""How pictures get from the scripts of the gallery to their pages; a module of its own, since Sphinx names it."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from sphinx_gallery.scrapers import figure_rst, matplotlib_scraper

_SEEN: list[Figure] = []


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

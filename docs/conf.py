"""The site: ``make docs`` builds it from these pages, the docstrings and the gallery. Nothing is fetched."""

import re
import sys
from importlib import metadata
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

sys.path.insert(0, str(Path(__file__).parent))  # for gallery_tools.py

project = "egop"
author = "The egop authors"
project_copyright = author
version = release = metadata.version("egop")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["gallery", "records"]

# Anchors as GitHub makes them, so that a link serves readers of both.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "gallery-pages",  # made by the build, ignored by git
    "filename_pattern": r"plot_",
    "image_scrapers": ("gallery_tools.scraped",),
    "within_subsection_order": "FileNameSortKey",
    "remove_config_comments": True,
    "download_all_examples": False,
    "capture_repr": (),
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "reset_modules": ("matplotlib", "gallery_tools.styled", "gallery_tools.clocked"),
    "reset_modules_order": "both",
    "abort_on_example_error": True,
}

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "egop"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which browsers refuse for files
html_theme_options = {"navigation_with_keys": True}

# Pages of the repository that lie outside this folder, and where the site has them.
ELSEWHERE = {
    "../CHANGELOG.md": "/changelog.md",
    "../CONTRIBUTING.md": "/contributing.md",
    "../lab/README.md": "/lab.md",
}


def adapted(app: Sphinx, name: str, source: list[str]) -> None:
    """What GitHub reads one way and MyST another: plain anchors, and links to pages outside this folder."""
    text = re.sub(r'^<a id="([^"]+)"></a>$', r"(\1)=", source[0], flags=re.MULTILINE)
    for path, page in ELSEWHERE.items():
        text = text.replace(f"]({path}", f"]({page}")
    source[0] = text


def write_math(translator: HTML5Translator, node: nodes.Element) -> None:
    """A formula as MathML, which browsers draw by themselves: nothing to download."""
    block = isinstance(node, nodes.math_block)
    # What docutils does not know of LaTeX, and MathML does by itself: brackets grow.
    text = re.sub(r"\\[bB]ig+[lr]?(?![a-z])", "", node.astext()).replace(r"\dots", r"\ldots")
    formula = tex2mathml(text, as_block=block)
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect the above."""
    app.connect("source-read", adapted)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))

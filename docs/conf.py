"""Configuration of the site, which ``make docs`` builds from these pages, the docstrings and the gallery.

Pages are plain Markdown that GitHub renders too. What only the site has is added when a page is read (:func:`adapt`).
Nothing is fetched.
"""

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
sys.path.insert(0, str(DOCS))  # for gallery_tools.py

project = "egop"
author = "The egop authors"
project_copyright = author
version = release = PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["gallery", "records", "site"]

# Anchors as GitHub makes them, so that a link serves readers of both.
myst_heading_anchors = 4

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
html_show_search_summary = False  # excerpts are fetched, which browsers refuse for local files
html_theme_options = {"navigation_with_keys": True}

# Files outside this folder that are pages of the site.
INCLUDED = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "lab/README.md": "lab",
}

_FENCED = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_ROW = re.compile(r"^\|.*\|$", flags=re.MULTILINE)
# Spaces of a table at which a line must not break: "1.16 ± 0.01", "(3 seeds)", "400 steps", "GPT 6×384", "41 %".
_TIED = re.compile(r"(?<=\d) (?=[±%])|(?<=±) (?=\d)|(?<=\d) (?=(?:seeds?|steps?|epochs?)\b)|(?<=GPT|ViT) (?=\d)")
_SCRIPT = re.compile(r"^\[[^\]]+\]\(([^)]+\.py)\)$", flags=re.MULTILINE)


def adapt(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn a page that GitHub renders into one of the site.

    - ``<!-- include: FILE -->`` becomes the content of a file.
    - ``<!-- site: NAME -->`` to ``<!-- end -->`` becomes ``site/NAME.html``.
    - ``<!-- toctree: A B -->`` becomes a hidden table of contents.
    - A line that is a link to a script becomes the script.
    - Links to other files of the repository become links to pages of the site, or to the repository.
    - In tables, numbers and their units stay on one line.
    """
    here = (DOCS / name).parent
    parts = re.split(r"<!-- include: (\S+) -->\n", source[0])
    texts = [_adapt_links(parts[0], here, here)]
    for file, rest in zip(parts[1::2], parts[2::2], strict=True):
        path = (here / file).resolve()
        texts += [_adapt_links(path.read_text(encoding="utf-8"), path.parent, here), _adapt_links(rest, here, here)]
    text = "".join(texts).replace("REPOSITORY", REPOSITORY)
    if name == "reproduction":
        pages = dict.fromkeys(re.findall(r"\]\(/(reproduction/[\w-]+)\.md\)", text))  # in the order of the summary
        text += f"\n<!-- toctree: {' '.join(pages)} reproduction/* -->\n"
    text = _ROW.sub(lambda row: _TIED.sub("\N{NO-BREAK SPACE}", row[0]), text)
    source[0] = re.sub(r"<!-- toctree: (.*?) -->", _format_toctree, text)


def _format_toctree(match: re.Match[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", ":glob:", "", *match[1].split(), "```"])


def _adapt_links(text: str, origin: Path, here: Path) -> str:
    """Adapt the links outside code blocks of a text whose links are relative to ``origin``."""

    def show_script(match: re.Match[str]) -> str:
        path = os.path.relpath((origin / match[1]).resolve(), here)
        return f"```{{literalinclude}} {path}\n:language: python\n```"

    def read_part(match: re.Match[str]) -> str:
        return f"```{{raw}} html\n{(DOCS / 'site' / match[1]).with_suffix('.html').read_text(encoding='utf-8')}```\n"

    text = re.sub(r"<!-- site: (\w+) -->\n.*?<!-- end -->\n", read_part, text, flags=re.DOTALL)
    parts = _FENCED.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = _SCRIPT.sub(show_script, parts[index])
        parts[index] = _LINK.sub(lambda match: f"]({_find_target(match[1], origin)})", parts[index])
    return "".join(parts)


def _find_target(link: str, origin: Path) -> str:
    """Return where a link of a page leads on the site."""
    place, mark, anchor = link.partition("#")
    if not place or re.match(r"[a-z]+:", link):
        return link
    path = (origin / place).resolve()
    file = path.relative_to(ROOT).as_posix()
    if file in INCLUDED:
        return f"/{INCLUDED[file]}.md{mark}{anchor}"
    if path.parent == DOCS / "gallery":
        return f"/gallery-pages/{path.stem}.rst"
    if path.suffix in {".md", ".svg"} and path.is_relative_to(DOCS):
        return f"/{path.relative_to(DOCS).as_posix()}{mark}{anchor}"
    return f"{REPOSITORY}/blob/main/{file}"


def write_math(translator: HTML5Translator, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers draw without a library."""
    block = isinstance(node, nodes.math_block)
    # docutils does not know these commands; in MathML brackets grow anyway.
    text = re.sub(r"\\[bB]ig+[lr]?(?![a-z])", "", node.astext()).replace(r"\dots", r"\ldots")
    formula = tex2mathml(text, as_block=block)
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def load_lazily(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Let browsers load a picture only when it comes into view."""
    if "body" in context:
        context["body"] = context["body"].replace("<img ", '<img loading="lazy" ')


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", adapt)
    app.connect("html-page-context", load_lazily)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))

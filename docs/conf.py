"""How Sphinx makes the site of docs/: Markdown by MyST, docstrings by autodoc, the theme furo, no other host."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import raglane

DOCS = Path(__file__).parent

project = "Raglane"
author = "The Raglane developers"
version = release = raglane.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Headings get the anchors that a code host gives them, so that links in the Markdown work in both places.
myst_heading_anchors = 4

nitpicky = True
nitpick_ignore_regex = [
    # What belongs to other projects stands on other sites, which the build does not ask.
    (
        r"py:.*",
        r"(torch|numpy|np|matplotlib|collections|copy|dataclasses|pathlib|os|typing|types)\..*|Tensor|Axes|Figure",
    ),
    # Type variables, and bases of which only the classes are public.
    (
        r"py:class",
        r"raglane\.(\w+\.)*([A-Z]|FlatBatch|Options|TrainingState|Way|Limit|Progress|Channel|Counted|Batch|Meter"
        r"|FeatureCounts|FeatureEncoder|Skipped)"
        r"|.*\bWatcher",
    ),
    # Docstrings that say what they implement by its short name.
    (
        r"py:(meth|func)",
        r"(CellSpec|RecurrentLayer|Path|raglane\.interop)\.\w+|masked|check_output|accelerate|modify",
    ),
]

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 72
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_title = "Raglane"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"


def _for_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Take links to Markdown outside of docs/, which is no page of the site, as links to the files.

    The blank line that ends an example is for the eyes of who reads the source.
    """
    folder = (DOCS / page).parent

    def link(found: re.Match[str]) -> str:
        is_page = (folder / found["name"]).resolve().is_relative_to(DOCS)
        return found[0] if is_page else f"](path:{found['name']})"

    text = re.sub(r"\]\((?P<name>\.\./[^)#\s]+\.md)(#[^)\s]*)?\)", link, source[0])
    source[0] = re.sub(r"\n\n( *```\n)", r"\n\1", text)


def _defaults_that_are_made(
    app: Sphinx, kind: str, name: str, item: object, options: object, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Write "..." for the default of a dataclass that a function makes: Sphinx cannot read what Python writes there."""
    return (signature and signature.replace("<factory>", "...")), result


def _accessible(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Mend what keeps a reader without a mouse, or with a screen reader, from a page that the theme made.

    What scrolls can be reached with the tab key; the parameters of a long signature are no list of definitions; the
    headings between the pages on the left have a level.
    """
    body = context.get("body", "")
    body = body.replace("<pre>", '<pre tabindex="0">')
    body = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    context["body"] = re.sub(
        r"<dl>\n((?:<dd>.*?</dd>\n)+)</dl>",
        lambda found: f'<div class="parameters">{found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")}</div>',
        body,
    )
    tree = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def _with_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures of pages that name them in HTML, for light and for dark, which Sphinx does not read."""
    if error is None:
        shutil.copytree(DOCS / "pictures", Path(app.outdir, "pictures"), dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    """Connect them to the build; the last one after the theme, which comes at 500."""
    app.connect("source-read", _for_the_site)
    app.connect("autodoc-process-signature", _defaults_that_are_made)
    app.connect("html-page-context", _accessible, priority=900)
    app.connect("build-finished", _with_pictures)

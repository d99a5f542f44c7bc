"""Sphinx configuration of the site: Markdown by MyST, docstrings by autodoc, the theme furo, no
external requests.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import raglane

DOCS = Path(__file__).parent
ROOT = DOCS.parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
RESULTS = ROOT / "benchmarks" / "results"
# Files outside of docs that are pages too. They are copied to docs/project, which git ignores.
COPIED = [
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "csrc" / "README.md",
    ROOT / "tools" / "faults" / "README.md",
    *ROOT.glob("examples/**/README.md"),
    *RESULTS.glob("*.md"),
]
PAGES = {ROOT / "README.md": DOCS / "index.md", ROOT / "CHANGELOG.md": DOCS / "changelog.md"}
PAGES |= {path: DOCS / "project" / path.relative_to(ROOT) for path in COPIED}
sys.path.insert(0, str(DOCS))

import charts  # noqa: E402
import notebook  # noqa: E402
import reference  # noqa: E402

project = "Raglane"
author = "The Raglane developers"
version = release = raglane.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Headings get the same anchors as on a code host, so that links in the Markdown work in both
# places.
myst_heading_anchors = 4

nitpicky = True
nitpick_ignore_regex = [
    # Names of other projects: the build does not download their inventories.
    (
        r"py:.*",
        r"(torch|numpy|np|matplotlib|collections|copy|dataclasses|pathlib|os|typing|types)\..*|Tensor|Axes|Figure",
    ),
    # Type variables, and private bases of public classes.
    (
        r"py:class",
        r"raglane\.(\w+\.)*([A-Z]|FlatBatch|Options|EncoderOptions|LayerOptions|FitOptions|ColumnOptions|TrainingState|Way|Limit|Progress|Channel|Sequences|Tensors"
        r"|Conversion|Batch|Meter|Chunk|FeatureCounts|FeatureEncoder|Skipped|Exported|Packaged|Verified"
        r"|ElementwiseWeights|Cost|Plan|Choice|Row|TablePredictor|Feature|Format|Statistics|ModelSettings|TrainingResult"
        r"|Targets|Task|ElementwiseSpec|Weights|_Data|Acceleration|Edits|SavedModel|Measured|ModelConfig|AsyncStream|BatchLimit|Event|StreamState|ClientStream|AsyncClientStream|CellSpec|BetterRule)"
        r"|Weights|Cost|Exported|ModelSettings"
        r"|.*\bWatcher",
    ),
    # Docstrings that refer to the implemented name without its module.
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
html_js_files = [("site.js", {"defer": "defer"})]
html_search_scorer = str(DOCS / "static" / "scorer.js")
html_favicon = "static/favicon.svg"
html_title = "Raglane"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
highlight_language = "none"  # of blocks without one
pygments_style = "default"
pygments_dark_style = "github-dark"


def _with_links(text: str, source: Path, page: Path) -> str:
    """Return the text of a file with the links of its page: to other pages, or to files that are no
    pages.
    """

    def link(found: re.Match[str]) -> str:
        path = (source.parent / found["name"]).resolve()
        if not path.is_file():
            return found[0]
        target = PAGES.get(path, path)
        name = os.path.relpath(target, page.parent)
        return (
            f"]({name}{found['anchor'] or ''})"
            if target.is_relative_to(DOCS)
            else f"](path:{name})"
        )

    return re.sub(r"\]\((?P<name>[^)#\s:]+\.\w+)(?P<anchor>#[^)\s]*)?\)", link, text)


def _copy_pages() -> None:
    """Write the pages of files outside of docs, those of results with charts."""
    for old in (DOCS / "project").rglob("*.md"):
        if old not in PAGES.values():
            old.unlink()
    for source in COPIED:
        page = PAGES[source]
        text = _with_links(source.read_text(encoding="utf-8"), source, page)
        if source.is_relative_to(RESULTS):
            # Only the summary of the results is in the navigation and in the search.
            front = "" if source.stem == "README" else "---\norphan: true\nnosearch: true\n---\n\n"
            text = front + charts.with_charts(text)
        if (
            not page.exists() or page.read_text(encoding="utf-8") != text
        ):  # else Sphinx would read the page again
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")


def _for_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links lead to pages or files, and remove the blank line that ends an example in the
    source.
    """
    path = DOCS / f"{page}.md"
    text = re.sub(r"\n\n( *```\n)", r"\n\1", _with_links(source[0], path, path))
    if page == "start" and (address := notebook.colab(URLS)):
        text = text.replace(
            "[notebook](start.ipynb)", f"[notebook](start.ipynb), which [Colab opens]({address})"
        )
    source[0] = reference.listing(page, text)


def _readable(
    app: Sphinx,
    kind: str,
    name: str,
    item: object,
    options: object,
    signature: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Write "..." for defaults of a factory, which Sphinx cannot parse, and leave out the arguments
    of any module.
    """
    if signature is not None and signature.startswith("(*args"):
        return "", result
    return (signature and signature.replace("<factory>", "...")), result


def _accessible(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Make the theme's pages accessible by keyboard and screen reader.

    Scrolling elements get a tab stop, parameters of long signatures are not definition lists, and
    headings of the navigation have a level.
    """
    body = context.get("body", "")
    body = body.replace("<pre>", '<pre tabindex="0">')
    body = _PICTURE.sub(_both_themes, body)
    body = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')
    context["body"] = re.sub(
        r"<dl>\n((?:<dd>.*?</dd>\n)+)</dl>",
        lambda found: (
            f'<div class="parameters">{found[1].replace("<dd>", "<div>").replace("</dd>", "</div>")}</div>'
        ),
        body,
    )
    tree = context["furo_navigation_tree"]
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )


_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]*)">\s*<img (alt="[^"]*") src="([^"]*)">\s*</picture>'
)


def _both_themes(found: re.Match[str]) -> str:
    """Return a picture of the chosen theme, which may differ from that of the system, and its width
    for the style sheet.
    """
    text = (DOCS / "pictures" / Path(found[3]).name).read_text(encoding="utf-8")
    width = re.search(r'<svg [^>]*\bwidth="([\d.]+pt)"', text)
    images = "".join(
        f'<img class="only-{theme}" loading="lazy" {found[2]} src="{source}">'
        for theme, source in (("light", found[3]), ("dark", found[1]))
    )
    style = f' style="--wide: {width[1]}"' if width else ""
    return f'<div class="picture" tabindex="0"{style}>{images}</div>'


def _one_signature(analyze: Any) -> Any:
    """Wrap autodoc's analysis of a module, so that a function has its own signature and not those
    of its overloads.
    """

    def analyzed(analyzer: ModuleAnalyzer) -> None:
        analyze(analyzer)
        analyzer.overloads = {}

    return analyzed


ModuleAnalyzer.analyze = _one_signature(ModuleAnalyzer.analyze)


def _with_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy pictures that pages include as HTML (light and dark), which Sphinx does not copy."""
    if error is None:
        shutil.copytree(DOCS / "pictures", Path(app.outdir, "pictures"), dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    """Connect the functions to the build; ``_accessible`` after the theme, whose priority is
    500.
    """
    _copy_pages()
    reference.write_pages()
    app.connect("source-read", _for_the_site)
    app.connect("autodoc-process-signature", _readable)
    app.connect("html-page-context", _accessible, priority=900)
    app.connect("build-finished", _with_pictures)

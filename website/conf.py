"""Sphinx's settings for the documentation site: `make docs`.

The pages are the Markdown files that a reader of the repository sees; no copy of them exists.
Sphinx is chosen because MyST reads the Markdown of GitHub (nested lists, anchors of headings), and
because both are maintained. `nav.toml` has the order of the pages.
"""

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import api  # noqa: E402

project = "fanin"
author = "the authors of fanin"
version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
include_patterns += ["docs/**.md", "website/*.md"]
exclude_patterns = ["target*", ".*", "crates", "fuzz", "lab", "tests", "experiments"]

# As GitHub: anchors at all headings, no guessed colours of code, no typographic quotes.
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
highlight_language = "text"
smartquotes = False

html_theme = "furo"
html_title = f"fanin {version}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
toc_object_entries_show_parents = "hide"
python_display_short_literal_types = True
python_maximum_signature_line_length = 80

NAV = tomllib.loads((HERE / "nav.toml").read_text())["section"]
TITLES = {
    entry["page"]: entry["title"]
    for section in NAV
    for entry in section["pages"]
    if isinstance(entry, dict)
}


def sidebar() -> str:
    """Return the sections of `nav.toml` as MyST's table of contents."""
    lines = []
    for section in NAV:
        pages = [entry if isinstance(entry, str) else entry["page"] for entry in section["pages"]]
        documents = [page.removesuffix(".md") for page in pages]
        lines += ["", "```{toctree}", ":hidden:", f":caption: {section['name']}", *documents, "```"]
    return "\n".join(lines) + "\n"


def complete(_app: Sphinx, document: str, source: list[str]) -> None:
    """Add what only the site has: the sidebar, missing headings, and the reference."""
    if document == root_doc:
        source[0] += sidebar()
    if title := TITLES.get(f"{document}.md"):
        source[0] = f"# {title}\n\n{source[0]}"
    if document.startswith("website/"):
        source[0] = api.expand(source[0], ROOT)


def redirect(app: Sphinx, failure: Exception | None) -> None:
    """Let the site's folder open on the README."""
    if failure is None:
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", complete)
    app.connect("build-finished", redirect)

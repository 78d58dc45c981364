"""Check that all links of a built site lead to something on it: ``python check.py FOLDER``.

Sphinx checks what Markdown says. This also checks what HTML says: links of the reference, and links
from the site's own pages into the pages of rustdoc, which Sphinx does not know.
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Take note of what a tag names."""
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif (name == "id" or (name == "name" and tag == "a")) and value:
                self.anchors.add(value)


@cache
def read(file: Path) -> Page:
    """Return what a page has."""
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def broken(folder: Path) -> list[str]:
    """Return the links that lead nowhere, with their pages. Rustdoc has checked its own."""
    found = []
    for file in sorted(folder.rglob("*.html")):
        if file.relative_to(folder).parts[0] == "rust":
            continue
        for link in sorted(read(file).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if target.is_dir():
                target /= "index.html"
            is_page = target.suffix == ".html" and target.is_file()
            if not target.is_file():
                found.append(f"{file.relative_to(folder)}: {link} is not there")
            elif parts.fragment and is_page and unquote(parts.fragment) not in read(target).anchors:
                found.append(f"{file.relative_to(folder)}: {link} has no such anchor")
    return found


if __name__ == "__main__":
    wrong = broken(Path(sys.argv[1]))
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)

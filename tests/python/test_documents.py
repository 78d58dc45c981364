"""Documents name tests, files, flags, variables and targets of make that exist, and count right."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest
from fanin._settings import Settings, variable

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()
SOURCES = (".rs", ".py", ".pyi", ".c", ".toml")


def code(*, tests: bool) -> str:
    """All sources, or those that are no tests: a flag must not be there because a test has it."""
    files = [file for file in TRACKED if file.endswith(SOURCES) and (ROOT / file).exists()]
    kept = [file for file in files if tests or not re.search("^tests/python/|/tests/", file)]
    return "\n".join((ROOT / file).read_text(errors="replace") for file in kept)


# The changelog keeps names that are gone.
PAGES = [file for file in TRACKED if file.endswith(".md") and PurePath(file).name != "CHANGELOG.md"]

PAPERS = ("SwitchML", "ATP", "BytePS", "DLCP", "GOAT")

# Horovod's.
FILES_OF_OTHERS = {"test/parallel/test_torch.py"}
MADE = (".venv/", "target/")
# Options of Slurm, Docker, torchrun, accelerate, cargo's tests, pkg-config and perf.
FLAGS_OF_OTHERS = {
    *("--nodes", "--no-kill", "--kill-on-bad-exit"),
    *("--rm", "--network", "--shm-size", "--shutdown-timeout"),
    *("--multi_gpu", "--num_processes", "--cpu", "--nocapture", "--modversion", "--sort"),
}


def quoted(page: str) -> list[str]:
    """What stands between backticks in a line."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", (ROOT / page).read_text())


def names_of_files() -> Iterator[str]:
    """Every end of a path: `udp/io_loop.rs` is crates/udp/src/io_loop.rs."""
    for file in TRACKED:
        for path in (PurePath(file), *PurePath(file).parents):
            parts = [part for part in path.parts if part != "src"]
            for whole in (path.parts, parts):
                yield from ("/".join(whole[start:]) for start in range(len(whole)))


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/protocols/")])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    known = set(re.findall(r"\b(?:fn|def) (\w+)", code(tests=True)))
    named = {
        name for name in quoted(page) if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+){3,}(\.\.)?", name)
    }
    for name in named:
        begin = name.removesuffix("..")
        is_there = begin in known or (begin != name and any(map(re.compile(begin).match, known)))
        assert is_there, f"{page} names {name}"


def test_every_file_that_a_page_names_exists() -> None:
    known = set(names_of_files())
    wrong = []
    for page in PAGES:
        for name in quoted(page):
            is_file = re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?|[\w-]+\.(rs|py|toml|proto)", name)
            is_other = name in FILES_OF_OTHERS or name.startswith(MADE) or name.endswith("/s")
            if is_file and not is_other and name.rstrip("/").replace("/src/", "/") not in known:
                wrong.append(f"{page} names {name}")
    assert wrong == []


def test_every_flag_variable_and_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    sources = code(tests=False)
    variables = set(re.findall(r"\bFANIN_[A-Z0-9_]+\b", sources))
    variables.add("FANIN_SEED")  # of tests
    variables |= {variable(field.name) for field in dataclasses.fields(Settings)}
    # As Python spells them, and as clap makes them of a field or is told.
    flags = set(re.findall(r"--[a-z][a-z0-9_-]+", sources))
    fields = re.findall(
        r"#\[arg\([^\]]*\blong\b[^\]]*\]\s*(?:#\[.*\]\s*)*(?:pub\S* )?(\w+):", sources
    )
    flags |= {"--" + name.replace("_", "-") for name in fields}
    flags |= {f"--{name}" for name in re.findall(r'long = "([\w-]+)"', sources)}
    wrong = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)) - FLAGS_OF_OTHERS:
            if flag not in flags:
                wrong.append(f"{page} names {flag}")
        wrong += [
            f"{page} names {name}"
            for name in set(re.findall(r"\bFANIN_[A-Z0-9_]+\b", text)) - variables
        ]
        wrong += [
            f"{page} names make {target}"
            for target in re.findall(r"`make ([\w-]+)", text)
            if target not in targets
        ]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().strip()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found[name] += 1
    return {
        f"{name}-{nth}" if nth else name for name, times in found.items() for nth in range(times)
    }


def test_every_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    wrong = []
    for page in [*PAGES, "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (ROOT / page).parent / path if path else ROOT / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{page} links to {link}")
    assert wrong == []


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    sections = tomllib.loads((ROOT / "website/nav.toml").read_text())["section"]
    entries = [entry for section in sections for entry in section["pages"]]
    pages = [entry if isinstance(entry, str) else entry["page"] for entry in entries]
    assert len(pages) == len(set(pages)), sorted({page for page in pages if pages.count(page) > 1})
    # The README is the site's first page; these are the others that the site has.
    of_site = {file for file in PAGES if file.startswith(("docs/", "website/"))}
    assert set(pages) == of_site | {"ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def test_a_page_of_the_site_has_one_title() -> None:
    sections = tomllib.loads((ROOT / "website/nav.toml").read_text())["section"]
    for section in sections:
        for entry in section["pages"]:
            page, title = (entry, None) if isinstance(entry, str) else entry.values()
            has_heading = (ROOT / page).read_text().startswith("# ")
            assert has_heading == (title is None), page


def test_counts_of_findings_are_those_of_the_papers_pages() -> None:
    kinds = (
        *("findings could have failed", "agree", "have the paper's number", "cannot tell"),
        *("differ, and a scenario", "differ and are unexplained"),
    )

    def counted(paper: str) -> list[int]:
        page = (ROOT / "docs" / "reproduction" / paper / "README.md").read_text()
        [line] = [line for line in page.splitlines() if kinds[0] in line]
        found = [re.search(rf"(\d+) {kind}", line) for kind in kinds]
        return [int(one[1]) if one else 0 for one in found]

    pages = {paper: counted(paper.lower()) for paper in PAPERS}
    readme = (ROOT / "README.md").read_text()
    rows = {paper: re.search(rf"^\| {paper} \|([ 0-9|]+)\|$", readme, re.M) for paper in PAPERS}
    shown = {
        paper: row and [int(cell) for cell in row[1].split("|")] for paper, row in rows.items()
    }
    assert shown == pages
    assert all(count == sum(rest) for count, *rest in pages.values())
    unexplained = sum(counts[-1] for counts in pages.values())
    text = (ROOT / "docs" / "reproduction.md").read_text()
    assert f"No scenario explains why {unexplained} rows differ." in text

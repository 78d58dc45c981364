"""What a report of a large network costs: to record, and to open in a browser.

`python benches/report.py` writes a part of docs/report.md. It plays 10,240 hosts in a fat tree with
a recording and without, by turns, and opens the report in Chromium: until the first picture of the
network is drawn.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import document
from fanin_lab.bench import machine
from performance import FANIN, ROOT

BEGIN = "<!-- what stands from here on is written by `python benches/report.py` -->"
END = "<!-- written by `python benches/report.py` to here -->"
PATH = ROOT / "docs" / "report.md"
TREE = ROOT / "experiments" / "scale" / "fat_tree.py"
ROUNDS, OPENED = 3, 7
# The map draws on a canvas, which has no event for it: two frames after its heading are enough.
DRAWN = """() => new Promise((drawn) => {
    const look = () => document.querySelector("canvas")?.width > 300
        ? requestAnimationFrame(() => requestAnimationFrame(() => drawn(performance.now())))
        : requestAnimationFrame(look);
    look();
})"""


def cpu_seconds(command: list[str]) -> float:
    """Run a command, and return the CPU time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def opening_seconds(report: Path, chromium: str) -> list[float]:
    """Return the seconds from the navigation to the first picture, each in a fresh page."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(OPENED):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(report.as_uri(), wait_until="commit")
            found.append(page.evaluate(DRAWN) / 1e3)
            page.close()
            time.sleep(1)  # the browser gives the page's memory back, which takes CPU time
        browser.close()
    return found


def main() -> int:
    """Measure by turns, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None:
        print("skipped: no browser: apt-get install chromium", file=sys.stderr)
        return 0
    where = machine.where()
    with tempfile.TemporaryDirectory() as folder:
        scenario, report = Path(folder) / "fat_tree.toml", Path(folder) / "fat_tree.html"
        scenario.write_text(subprocess.check_output([sys.executable, str(TREE)], text=True))
        play = [*FANIN, "sim", str(scenario)]
        alone, recorded = [], []
        for _ in range(args.rounds):
            alone.append(cpu_seconds(play))
            recorded.append(cpu_seconds([*play, "--report", str(report)]))
        size = report.stat().st_size
        opened = opening_seconds(report, chromium)
    text = document.where_line(f"python benches/report.py --rounds {args.rounds}", where) + "\n"
    text += (
        f"10,240 hosts and 1,152 switches (`{TREE.relative_to(ROOT)}`), medians of {args.rounds} "
        f"turns and of {OPENED} openings, least and most in brackets.\n\n"
    )
    rows = [
        ["CPU seconds of the run", spread(alone)],
        ["CPU seconds of the run with its report", spread(recorded)],
        ["size of the report", f"{size / 1e6:.1f} MB"],
        ["seconds until Chromium has drawn the network", spread(opened)],
    ]
    text += document.table(["what", "measured"], rows)
    args.into.write_text(document.rewritten(args.into.read_text(), text, BEGIN, END))
    return 0


def spread(values: list[float]) -> str:
    """Return the median, with the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())

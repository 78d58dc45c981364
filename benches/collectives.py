"""The other collectives beside Gloo's, by size, and a step of FSDP2, for docs/performance.md.

`python benches/collectives.py`, as root. It is from this table that `fanin.torch.backend` knows
which collectives of which sizes are Gloo's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import document
from fanin_lab.bench import COLLECTIVES
from fanin_lab.units import shown_size, shown_time
from performance import ROOT, FailedError, bench, no_laboratory

BEGIN = "<!-- what stands from here on is written by `python benches/collectives.py` -->"
END = "<!-- written by `python benches/collectives.py` to here -->"
PATH = ROOT / "docs" / "performance.md"
CLUSTERS: Mapping[str, Sequence[str]] = {
    "4, unshaped": ("--workers", "4", "--mtu", "1500"),
    "8, 1 Gbit/s": ("--workers", "8", "--rate", "1gbit"),
    "4 on one machine": ("--workers", "4", "--ranks-per-machine", "4", "--mtu", "1500"),
    "2 x 4, 1 Gbit/s": ("--workers", "8", "--ranks-per-machine", "4", "--rate", "1gbit"),
}
STEPS = ("--workers", "4"), ("--workers", "8", "--ranks-per-machine", "4")
SIZES = "4KB,64KB,1MB,25MB"
OPTIONS = ("--plan", "own", "--warmup", "1", "--repeat", "5")
QUICK = ("--workers", "2"), ("--size", "4KB", "--plan", "own", "--warmup", "0", "--repeat", "1")


def main() -> int:
    """Measure, and write the part of the document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny, on loopback, to see that it runs"
    )
    parser.add_argument("--into", type=Path, default=PATH, metavar="FILE")
    args = parser.parse_args()
    if not args.quick and (why := no_laboratory()):
        print(why, file=sys.stderr)
        return 1
    clusters = {"2, loopback": QUICK[0]} if args.quick else CLUSTERS
    options = QUICK[1] if args.quick else ("--size", SIZES, *OPTIONS)
    lines, results = [], []
    try:
        for name in list(COLLECTIVES)[-1:] if args.quick else COLLECTIVES:
            for cluster, where in clusters.items():
                print(f"{name}: {cluster}", file=sys.stderr, flush=True)
                results.append(bench([*where, *options], name=name))
                lines += [_row(name, cluster, run) for run in results[-1]["runs"]]
        steps = [] if args.quick else [_step(which) for which in STEPS]
    except FailedError as error:
        print(error, file=sys.stderr)
        return 1
    heads = ["collective", "workers, links", "size", "fanin", "Gloo", "", "CPU s/GB: fanin", "Gloo"]
    command = "fanin bench COLLECTIVE WORKERS " + " ".join(options)
    parts = [
        document.where_line("python benches/collectives.py", results[0]),
        f"One run of each: `{command}`. Medians; times as fast as Gloo.\n",
        document.table(heads, lines),
    ]
    parts += [f"`{command}`, at 1 Gbit/s:\n\n```\n{said}```\n" for command, said in steps]
    text = args.into.read_text() if args.into.exists() else None
    args.into.write_text(document.rewritten(text, "\n".join(parts), BEGIN, END))
    return 0


def _row(name: str, cluster: str, run: Mapping[str, Any]) -> list[str]:
    fanin, gloo = run["backends"]["fanin"], run["backends"]["gloo"]
    return [
        name,
        cluster,
        shown_size(run["payload_bytes"]),
        shown_time(fanin["median_s"]),
        shown_time(gloo["median_s"]),
        f"{run['ratio_to_gloo']:.2f}",
        f"{fanin['ranks_cpu_s_per_gb']:.1f}",
        f"{gloo['ranks_cpu_s_per_gb']:.1f}",
    ]


def _step(which: Sequence[str]) -> tuple[str, str]:
    program = Path(__file__).with_name("sharded.py")
    done = subprocess.run(
        [sys.executable, str(program), *which], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise FailedError(done.stderr.strip().splitlines()[-1])
    return " ".join(["python benches/sharded.py", *which]), done.stdout


if __name__ == "__main__":
    sys.exit(main())

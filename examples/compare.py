"""The same training twice, on fanin and on Gloo: both loss curves, both speeds, and a verdict.

    python examples/compare.py

Runs examples/gpt.py under `fanin run --plan switch`, whose switch sums, and under torchrun with
Gloo, on this machine, about two minutes in all on two cores. Exit status 1 if the curves differ by
more than the stated bound anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GPT = Path(__file__).with_name("gpt.py")

# The largest difference of the two losses, at any step, that is still rounding.
#
# fanin sums block-scaled integers, Gloo sums floats in ring order, so the gradients differ by
# rounding, and training carries that on. Both are deterministic; with the defaults of this file
# (4 ranks, 300 steps) the curves differ by 2.4e-7, which is one unit in the last place of a float32
# loss. The bound is four of those. It is tight enough to see a defect: the smallest, one chunk of
# one rank left out of one sum, moves the loss by 2e-6; noise of 2^-18 of a gradient's neighbourhood
# in every sum moves it by 3e-6.
BOUND = 1e-6

ROWS = 15


def train(launcher: list[str], backend: str, args: argparse.Namespace, folder: Path) -> Any:
    """One run, its output passed on as it comes; returns what gpt.py wrote with --json."""
    result = folder / f"{backend}.json"
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(args.ranks)]
    command += [str(GPT), "--backend", backend, "--steps", str(args.steps), "--json", str(result)]
    print(f"\n$ {' '.join(command[1:])}", flush=True)
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        sys.exit(f"the {backend} run failed with status {status}")
    return json.loads(result.read_text(encoding="utf-8"))


def main() -> int:
    """Run both, print both, and judge."""
    parser = argparse.ArgumentParser(description="fanin beside Gloo on the same training")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        fanin = train(["fanin", "run", "--plan", "switch"], "fanin", args, Path(name))
        gloo = train(["torch.distributed.run"], "gloo", args, Path(name))

    pairs = list(zip(fanin["losses"], gloo["losses"], strict=True))
    print(f"\n{'step':>6} {'loss, fanin':>13} {'loss, gloo':>13} {'difference':>12}")
    for index in sorted({0, len(pairs) - 1, *range(0, len(pairs), max(1, len(pairs) // ROWS))}):
        ours, theirs = pairs[index]
        print(f"{index + 1:6d} {ours:13.6f} {theirs:13.6f} {abs(ours - theirs):12.1e}")
    speeds = [run["tokens_per_second"] for run in (fanin, gloo)]
    print(f"\ntokens/s: fanin {speeds[0]:,.0f}, gloo {speeds[1]:,.0f}")

    largest, step = max((abs(a - b), i + 1) for i, (a, b) in enumerate(pairs))
    # Written so that a loss that is not a number does not pass.
    agree = largest <= BOUND and all(a == a and b == b for a, b in pairs)
    print(
        f"the curves {'agree' if agree else 'DO NOT AGREE'}: "
        f"largest difference {largest:.1e} (step {step}), bound {BOUND:.0e}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

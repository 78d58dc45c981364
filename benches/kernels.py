"""The kernels beside memcpy: what `cargo bench --package fanin-quant` prints last."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

COMMAND = ["cargo", "bench", "--package", "fanin-quant"]

_HEAD = re.compile(r"^kernel +GB/s +share of memcpy$", re.MULTILINE)
_LINE = re.compile(r"^(\S+) +([\d.]+) +(\d+) %$", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One line of the table: ``Avx2/quantize_f32/352``."""

    name: str
    gb_per_s: float
    memcpy_percent: int

    @property
    def is_memcpy(self) -> bool:
        """Whether it is what the others are held against."""
        return self.name.startswith("memcpy/")


def missing() -> str | None:
    """Return why it cannot run, if it cannot."""
    return None if shutil.which(COMMAND[0]) else "cargo is not in the PATH"


def parse(printed: str) -> list[Kernel]:
    """Return the table at the end of what the bench printed.

    Raises `ValueError` if there is none.
    """
    head = _HEAD.search(printed)
    found = _LINE.findall(printed, head.end()) if head else []
    table = [Kernel(name, float(rate), int(share)) for name, rate, share in found]
    if not any(kernel.is_memcpy for kernel in table):
        raise ValueError("cargo bench printed no table of shares of memcpy")
    return table

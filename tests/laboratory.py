"""Laboratories (`fanin netlab`) of tests: machines whose links lose packets, and are cut."""

from __future__ import annotations

import os
import shutil

import pytest

MISSING = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
needs_lab = pytest.mark.skipif(
    os.geteuid() != 0 or bool(MISSING),
    reason=f"not root, or missing: {', '.join(MISSING) or 'nothing'} "
    "(apt-get install iproute2 nftables)",
)
# A worker of pytest-xdist has its own.
NAME = f"test{os.environ.get('PYTEST_XDIST_WORKER', '')}"

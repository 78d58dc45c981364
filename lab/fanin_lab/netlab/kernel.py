"""The laboratory's needs of the system: root, and three tools with their arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from fanin.errors import FaninError

_PACKAGES = {
    "ethtool": "ethtool",
    "ip": "iproute2",
    "nft": "nftables",
    "tc": "iproute2",
    "unshare": "util-linux",
}


class NetlabError(FaninError):
    """The laboratory cannot be built or reached; the message says what to do."""


def namespace_of(name: str, member: str) -> str:
    """Return the name under which `ip netns` knows a member of the laboratory of that name."""
    return f"fanin-{name}-{member}" if name else f"fanin-{member}"


def checked_name(name: str) -> str:
    """Return the name if it can be one.

    Raises `NetlabError`.
    """
    if not re.fullmatch(r"[a-z0-9]{0,20}", name):
        raise NetlabError(f"{name!r} is no name of a laboratory: up to 20 small letters and digits")
    return name


def inside(namespace: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs the command in the namespace."""
    return ["ip", "netns", "exec", namespace, *command]


def run(command: Sequence[str], text: str = "", what: str = "") -> str:
    """Run one of the tools on the text, and return what it prints.

    Raises `NetlabError` with what it said, about ``what``, if it fails.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise NetlabError(f"{what or ' '.join(command)}: {said}")
    return done.stdout


def batch(tool: Sequence[str], lines: Sequence[str]) -> None:
    """Run one of iproute2's tools on many lines at once: a process a line would take seconds."""
    run([*tool, "-batch", "-"], "\n".join(lines) + "\n")


def require_root() -> None:
    """Raise `NetlabError` without root."""
    if os.geteuid() != 0:
        # By its path, as sudo does not look into a virtual environment.
        program = shutil.which("fanin") or f"{sys.executable} -m fanin"
        raise NetlabError(f"network namespaces need root: try again with sudo {program}")


def require_tools(*tools: str) -> None:
    """Raise `NetlabError`, with the command that installs them, if tools are missing."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_PACKAGES[tool] for tool in missing}))
        raise NetlabError(
            f"missing: {', '.join(missing)}; install with: apt-get install -y {packages}"
        )

"""Unmodified JAX programs on fanin: `python -m fanin.jax.mpi program.py` (docs/jax.md).

XLA's CPU client can take its collectives from an MPI. MPItrampoline, a part of jaxlib, loads that
MPI from the file that the environment names. It does so when jaxlib is imported, so the variables
must be set before the program starts. `library` makes the file with a C compiler: from `mpi.c`, and
from the names that this jaxlib looks up. `mpi_calls.py` does the calls.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

CALLED: Final = (
    "Allgather",
    "Allreduce",
    "Comm_rank",
    "Comm_size",
    "Comm_split",
    "Error_string",
    "Finalize",
    "Irecv",
    "Isend",
    "Reduce_scatter",
    "Sendrecv",
    "Wait",
)
"""The functions of MPI that `mpi_calls.py` does."""
_IN_C: Final = ("Comm_free", "Init_thread", "Is_thread_main")
_DEFINED: Final = frozenset(f"MPIABI_{name}" for name in (*CALLED, *_IN_C))
_SOURCE: Final = Path(__file__).with_name("mpi.c")
_NAME: Final = re.compile(rb"\0(MPIX?ABI_\w+)(?=\0)")


class UnsafeLibrary(RuntimeError):  # noqa: N818 - what is wrong
    """Somebody else could have written the library; the message says what to do."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"fanin does not load an MPI from {path}, which {reason}: make it your own (chown) and "
            "let nobody else write to it (chmod go-w), or let XDG_CACHE_HOME name a folder of yours"
        )


def environment() -> dict[str, str]:
    """Return the variables with which JAX takes its collectives on CPUs from fanin.

    Raises `RuntimeError` as `library` does.
    """
    return {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi",
        "MPITRAMPOLINE_LIB": str(library()),
    }


def library() -> Path:
    """Return the file of fanin's MPI for the jaxlib that is installed.

    It is compiled at the first call, and kept in the user's cache folder. Machines with a common
    folder have a file each, if their architectures or their C libraries differ. Raises
    `RuntimeError` if there is no C compiler (`cc`, or the command in CC), if it fails, if the
    folder cannot be written to, or if this jaxlib has no MPItrampoline. Raises `UnsafeLibrary` if
    the file or its folder belongs to another user, or if other users can write to it.
    """
    names = _declarations(_names())
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    key = hashlib.sha256("\0".join((*compiler, _SOURCE.read_text(), names)).encode()).hexdigest()
    machine = "-".join(filter(None, (platform.machine(), *platform.libc_ver())))
    made = _cache() / f"mpi-{machine}-{key[:16]}.so"
    try:
        made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _own(made.parent)
        if made.exists():
            return _own(made)
        # Several ranks may come here at once, so each of them compiles in its own folder.
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            header, result = Path(folder, "names.h"), Path(folder, "mpi.so")
            header.write_text(names)
            flags = ["-shared", "-fPIC", "-O1", f'-DFANIN_NAMES="{header}"', "-o", str(result)]
            command = [*compiler, *flags, str(_SOURCE), "-ldl"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            # The umask may let a group write to it.
            result.chmod(0o700)
            result.replace(made)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{compiler[0]} cannot compile {_SOURCE}: {error.stderr}") from error
    except OSError as error:
        raise RuntimeError(
            f"cannot make {made} with {compiler[0]}: {error}; install a C compiler or name it by "
            "CC, and let XDG_CACHE_HOME name a folder that can be written to"
        ) from error
    return _own(made)


def main(arguments: list[str]) -> None:
    """Run Python with these arguments and the variables; without arguments, print the variables."""
    said = environment()
    if arguments:
        os.execve(sys.executable, [sys.executable, *arguments], os.environ | said)
    for name, value in said.items():
        print(f"export {name}={shlex.quote(value)}")


def _cache() -> Path:
    # By the XDG Base Directory specification a relative path does not count.
    if (named := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):
        return Path(named, "fanin")
    return Path.home() / ".cache" / "fanin"


def _own(path: Path) -> Path:
    """Return the path. Raises `UnsafeLibrary` unless this user alone can write to it."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise UnsafeLibrary(path, f"belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeLibrary(path, f"other users can write to (mode {found.st_mode & 0o777:o})")
    return path


def _names() -> list[str]:
    """Return the names that jaxlib's MPItrampoline looks up. They are among jaxlib's constants."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or found.origin is None:
        raise RuntimeError('jaxlib is not installed: pip install "fanin[jax]"')
    file = Path(found.origin).with_name("libjax_common.so")
    try:
        opened = file.open("rb")
    except OSError as error:
        raise RuntimeError(f"cannot read this jaxlib's MPItrampoline: {error}") from error
    with opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as text:
        names = sorted({name.decode() for name in _NAME.findall(text)})
    if missing := _DEFINED - set(names):
        raise RuntimeError(f"{file} does not look up {', '.join(sorted(missing))} of an MPI")
    return names


def _declarations(names: list[str]) -> str:
    """Declare the names that `mpi.c` does not define.

    Names without small letters are constants. Each gets a number of its own.
    """
    lines = []
    for number, name in enumerate(names, start=1):
        if name.isupper():
            lines.append(f"CONSTANT({name}, {0 if name == 'MPIABI_SUCCESS' else number})")
        elif name not in _DEFINED:
            lines.append(f"FUNCTION({name})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])

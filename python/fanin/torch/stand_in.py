"""FANIN_AS=gloo: programs that ask for the backend "gloo" get groups on fanin.

Torch 2.15 makes every backend through a creator that is looked up by name, and its own creator of
"gloo" is looked up only when the name is asked for first. Ours takes that place before: all of
torch's ways to a group end there, and what torch and frameworks ask of a group by its name
(`get_backend`, devices, the default timeout) is answered as for Gloo.

TorchComms comes before creators where a program switches it on, and it has a "gloo" of its own.
It is told that the name is not one of its names.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d as c10d

from fanin._settings import AS_VARIABLE, as_backend

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

log = logging.getLogger(__name__)
_said = False


def install() -> None:
    """Take Gloo's place if FANIN_AS asks for it; without it, change nothing. Repeatable.

    Raises `ValueError` if FANIN_AS is no backend that can be stood in for, and `RuntimeError` if
    this torch offers no place for it: a program that asks for both is better not run than run on
    Gloo.
    """
    name = as_backend()
    if name is None:
        return
    if not hasattr(c10d.Backend, "_ensure_backend_registered"):
        from torch import __version__ as version

        raise RuntimeError(f"{AS_VARIABLE}={name} needs torch 2.15 or later, and this is {version}")
    # Its type becomes CUSTOM: what has Gloo's is cast to Gloo's C++ class, unseen, by DDP's logger.
    c10d.Backend.register_backend(
        name, _create, extended_api=True, devices=c10d.Backend.backend_capability[name]
    )
    # The flight recorder leaves out groups named "gloo", which record themselves; ours do not.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).discard(name)
    _keep_from_torchcomms(name)


def _keep_from_torchcomms(name: str) -> None:
    """Have torch make groups of this name by their creator, also with TorchComms switched on.

    TorchComms may be switched on at any time, so torch is always told.
    """
    handles = getattr(c10d, "_torchcomms_handles_backend", None)
    if handles is None or hasattr(handles, "__wrapped__"):
        return

    @functools.wraps(handles)
    def handles_others(backend: str | None) -> bool:
        names = {part.strip().rpartition(":")[2] for part in str(backend).lower().split(",")}
        return name not in names and bool(handles(backend))

    c10d._torchcomms_handles_backend = handles_others


def _create(options: _DistributedBackendOptions, backend_options: object | None) -> Backend:
    from fanin.torch.backend import create
    from fanin.torch.backend.options import Options

    # Gloo ignores `pg_options` of every kind, so options that are not ours are not refused.
    ours = backend_options if isinstance(backend_options, Options) else None
    backend = create(options, ours)
    _say_once(options, backend.settings.switch)
    return backend


def _say_once(options: _DistributedBackendOptions, switch: str | None) -> None:
    """Tell it by rank 0 of the first group of more than one rank.

    As a warning: a program that sets up no logging has these on stderr, and others nowhere.
    """
    global _said
    if _said or options.group_size == 1:
        return
    _said = True
    if options.group_rank == 0:
        by = "in its ranks' processes" if switch is None else f"with the switch at {switch}"
        log.warning(
            'fanin: the program asks for "gloo", and fanin sums its gradients %s (%s=gloo)',
            by,
            AS_VARIABLE,
        )

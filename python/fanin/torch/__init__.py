"""The backend "fanin" of torch.distributed, a DDP communication hook, and optimizers.

Torch finds the backend by itself: `import torch` registers it through the entry-point group
``torch.backends``, and where that is switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), the first
group that asks for it does, through ``torch.distributed.backends``.

    torch.distributed.init_process_group("fanin")

Nothing has to be started for it: the ranks sum, each machine's among themselves first. Machines
that only sum (``fanin switch``) are named by FANIN_SWITCH. "Services" below are both.

Programs that have "gloo" written in them run unchanged with FANIN_AS=gloo, or
``fanin run --as gloo`` (see `fanin.torch.stand_in`).

With ``pg_options=fanin.torch.Options(wire_dtype="bfloat16")`` gradients travel in half the bytes,
with ``"int8"`` in a quarter, and with ``"int4"`` in an eighth (DDP's rounding errors are kept for
its next step by `HookState`),
with ``protocol="atp"`` (FANIN_PROTOCOL) they are summed on the way to a server, with ``"goat"``
by a plan (`sub_models` cuts a model into the parts that it is made for). `compression_hook` sends
gradients in fewer bytes still, by signs, or by the largest of them (docs/compression.md).

All-reduces, reduces and reduce_scatters (SUM, AVG) of float32, float16, bfloat16 and int32 tensors,
on the CPU or on CUDA devices, are summed by the services, and of float64, int64, uint8 and int8
tensors, too; broadcast and all_gather move bits of any dtype. ATP and GOAT have all-reduces
alone, of the first four: the ranks' own services sum the rest, once such a sum begins, and then
move bits, too (docs/protocols/atp.md). Racks of SwitchML have all-reduces alone, and an all_gather
of more than 1 MB in all is faster on Gloo where some machine has a single rank. All that is not
served so is served by a Gloo group over the same store. The choice is each rank's own: where the
ranks' dtypes or ops differ such that some go to Gloo, the collective ends with
`fanin.errors.AllReduceTimeout`.

CUDA tensors pass through pinned host memory, in segments of 4 MiB, copied while others are on the
network. A collective comes after what the current stream was given before it. `Work.wait()` blocks
the host until the network is done, so that it can raise, and then the current stream until the sum
is copied in; the work's future orders the streams of its users by itself. The group's timeout
bounds each segment. The ranks' tensors are all on the CPU or all on CUDA devices: a rank that
differs is told of by `fanin.errors.CollectiveMismatch`, unless the tensor is one segment. A
collective cannot be captured into a CUDA graph, and none may be under way during a capture.

A barrier comes after all all-reduces in flight, as on Gloo, and so does `destroy_process_group`,
for some seconds; what is not over then fails with `fanin.errors.Closed`. A collective whose
options have a timeout of their own ends with `fanin.errors.AllReduceTimeout` when that has passed,
and with it the group, as after the group's own timeout: make a new one to go on.

Errors are those of `fanin.errors`, also out of `backward()` (torch's error is their cause), and
where a connection of Gloo's tells of a rank that is gone. Only of a future torch keeps the text.
Where the services do not know within some seconds who is gone, the group ends all the same.

Futures complete, and their callbacks run, in the order of the submissions, one at a time; what a
callback begins has an order of its own, by a group beside (`works.turns`). So torch's PowerSGD
hook, whose callbacks begin all-reduces, is the same on all ranks with several buckets too.

Sums are written into a tensor's memory while Python runs on. From `all_reduce` until
its work is done, also if a timeout ended a `wait`, neither use the tensor nor resize or free its
storage (`resize_`, `untyped_storage().resize_`, `set_`): the memory is held by its address.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, _DistributedBackendOptions

    from fanin.torch.backend import loss_bound as loss_bound
    from fanin.torch.backend import lost as lost
    from fanin.torch.backend import plan as plan
    from fanin.torch.backend import priority as priority
    from fanin.torch.backend import replan as replan
    from fanin.torch.backend import shrink as shrink
    from fanin.torch.backend.fault_tolerant import ProcessGroupFanin as ProcessGroupFanin
    from fanin.torch.backend.options import Options as Options
    from fanin.torch.backend.sub_models import sub_models as sub_models
    from fanin.torch.compression import CompressionState as CompressionState
    from fanin.torch.compression import compression_hook as compression_hook
    from fanin.torch.hooks.all_reduce import HookState as HookState
    from fanin.torch.hooks.all_reduce import allreduce_hook as allreduce_hook
    from fanin.torch.hooks.machine import MachineState as MachineState
    from fanin.torch.hooks.machine import machine_hook as machine_hook
    from fanin.torch.optimizers.asynchronous import AsynchronousOptimizer as AsynchronousOptimizer
    from fanin.torch.optimizers.delta import DeltaOptimizer as DeltaOptimizer
    from fanin.torch.optimizers.overlap import DistributedOptimizer as DistributedOptimizer

__all__ = [
    "AsynchronousOptimizer",
    "CompressionState",
    "DeltaOptimizer",
    "DistributedOptimizer",
    "HookState",
    "MachineState",
    "Options",
    "allreduce_hook",
    "compression_hook",
    "loss_bound",
    "lost",
    "machine_hook",
    "plan",
    "priority",
    "replan",
    "shrink",
    "sub_models",
]

_MODULES = {
    "AsynchronousOptimizer": "optimizers.asynchronous",
    "CompressionState": "compression",
    "DeltaOptimizer": "optimizers.delta",
    "DistributedOptimizer": "optimizers.overlap",
    "HookState": "hooks.all_reduce",
    "MachineState": "hooks.machine",
    "Options": "backend.options",
    "ProcessGroupFanin": "backend.fault_tolerant",
    "allreduce_hook": "hooks.all_reduce",
    "compression_hook": "compression",
    "loss_bound": "backend",
    "lost": "backend",
    "machine_hook": "hooks.machine",
    "plan": "backend",
    "priority": "backend",
    "replan": "backend",
    "shrink": "backend",
    "sub_models": "backend.sub_models",
}
"""Where each is; loaded when it is asked for, as `import torch` imports this one."""

BACKEND = "fanin"


def _register() -> None:
    """Make the name "fanin" known to torch.distributed, and do what FANIN_AS asks. Repeatable.

    It runs inside `import torch`, where an exception would take torch away from every program: it
    is cheap, and raises only what a FANIN_AS that cannot be followed deserves.
    """
    try:
        from torch import distributed

        if not distributed.is_available():
            return
        if not hasattr(distributed.Backend, BACKEND.upper()):
            distributed.Backend.register_backend(
                BACKEND, _create, extended_api=True, devices=["cpu", "cuda"]
            )
    except Exception:  # a torch that we do not know: its users lose this backend, not torch
        import logging

        logging.getLogger(__name__).warning(
            "fanin could not tell this torch of the backend %r, which is not to be had",
            BACKEND,
            exc_info=True,
        )
    if os.environ.get("FANIN_AS"):
        from fanin.torch import stand_in

        stand_in.install()


def _create(options: _DistributedBackendOptions, backend_options: object | None) -> Backend:
    from torch import __version__ as version

    if version < "2.14":
        raise RuntimeError(f"the backend fanin needs torch 2.14 or later, and this is {version}")
    from fanin.torch.backend import create

    return create(options, backend_options)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


# After the definitions: if this is what first imports torch, torch comes back for `_register`.
try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _missing:
    if _missing.name != "torch":
        raise
    from fanin._cures import to_install

    _text = f"fanin.torch needs PyTorch; install it with: {to_install('torch')}"
    raise ModuleNotFoundError(_text, name="torch") from None

_register()

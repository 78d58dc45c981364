"""One training of a script, with losses: `python -m fanin_lab.profiler.trial WHAT SCRIPT ...`.

Where the script has DistributedDataParallel, each rank's packets of each bucket are lost before the
buckets are summed, and the mean is over the ranks whose packet came. Else the process is the only
worker: packets of its gradients are lost before an optimizer's step. What nobody has is 0.
"""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

import atexit
import contextlib
import gc
import io
import json
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from fanin import profile
from torch import Generator, Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fanin_lab.profiler.drops import Losses, Packets, mean_of_received

SEEDS_APART = 1000
"""How far the seeds of two trainings are apart: scripts add ranks and epochs to their own."""


class Network:
    """Loses packets of gradients, and counts them."""

    def __init__(self, losses: Losses, seed: int, rank: int) -> None:
        self.sent = 0
        self.lost = 0
        self._losses = losses
        # Of its own: losses leave the script's random numbers as they are.
        self._dice = Generator().manual_seed((seed << 16) + rank)
        self._cut: dict[Any, Packets] = {}
        self._sums_by_ddp = False

    def install(self) -> None:
        """Lose what is handed to all optimizers and all of DDP from now on, in this process."""
        register_optimizer_step_pre_hook(self._before_step)
        begin = DistributedDataParallel.__init__

        def begin_and_lose(ddp: Any, *args: Any, **kwargs: Any) -> None:
            begin(ddp, *args, **kwargs)
            self._sums_by_ddp = True
            layers = {p: at for at, p in enumerate(ddp.module.parameters())}
            register(ddp, (layers, ddp.process_group), self._sum)

        register = DistributedDataParallel.register_comm_hook
        changed: Any = DistributedDataParallel
        changed.__init__ = begin_and_lose
        # DDP has one hook, and it is ours here: sums are float32's whatever hook the script has.
        changed.register_comm_hook = lambda *_: None

    def _keep(self, grads: Sequence[Tensor], layers: Sequence[int], of: int) -> Tensor:
        """Return for each element of these tensors, one after the other, whether it comes."""
        sizes = tuple(grad.numel() for grad in grads)
        key = sizes, tuple(layers)
        if key not in self._cut:
            self._cut[key] = Packets(sizes, layers, grads[0].element_size())
        packets = self._cut[key]
        flat = torch.cat([grad.detach().flatten() for grad in grads])
        received = packets.received(flat, self._losses, of, self._dice)
        self.sent += len(packets)
        self.lost += int((~received).sum())
        return received[packets.of_element].to(flat.device)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._sums_by_ddp:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        having = [(at, p.grad) for at, p in enumerate(parameters) if p.grad is not None]
        # Of one type and device at a time: a message of others is another one.
        for kind in {(grad.dtype, grad.device) for _, grad in having}:
            alike = [(at, grad) for at, grad in having if (grad.dtype, grad.device) == kind]
            layers, grads = [at for at, _ in alike], [grad for _, grad in alike]
            keep = self._keep(grads, layers, len(parameters))
            parts = torch.split(keep, [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                # Not a product: what is lost may be no number.
                grad.masked_fill_(~part.view_as(grad), 0)

    def _sum(
        self, state: tuple[Mapping[Tensor, int], dist.ProcessGroup], bucket: GradBucket
    ) -> torch.futures.Future[Tensor]:
        layers_of, group = state
        layers = [layers_of[parameter] for parameter in bucket.parameters()]
        comes = self._keep(bucket.gradients(), layers, len(layers_of))
        total = bucket.buffer().masked_fill_(~comes, 0)
        workers_in = comes.to(total.dtype)
        dist.all_reduce(total, group=group)
        dist.all_reduce(workers_in, group=group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(mean_of_received(total, workers_in))
        return done


def _seed_everything(seed: int) -> None:
    """Seed the generators that scripts use, and let each seed of the script's be another one."""
    moved = SEEDS_APART * seed

    def other(own: Callable[..., Any]) -> Callable[..., Any]:
        def seed_another(value: Any = None, *args: Any, **kwargs: Any) -> Any:
            # None asks for a seed by chance; NumPy takes arrays, and no number above 2^32.
            value = (value + moved) % 2**32 if isinstance(value, int) else value
            return own(value, *args, **kwargs)

        return seed_another

    homes: list[tuple[Any, str]] = [(torch, "manual_seed"), (random, "seed")]
    try:
        import numpy

        homes.append((numpy.random, "seed"))
    except ImportError:
        pass
    for home, name in homes:
        setattr(home, name, other(getattr(home, name)))
        getattr(home, name)(0)
    torch.random.manual_seed = torch.manual_seed


def main(argv: list[str]) -> None:
    """Train once; ``argv`` is what `Trials.run` says, the script, and its arguments."""
    what = json.loads(argv[0])
    rank = int(os.environ.get("RANK", "0"))
    network = Network(Losses(**what["losses"]), what["seed"], rank)
    network.install()
    _seed_everything(what["seed"])
    if rank == 0:
        # Open until the script ends; each line is shorter than what a pipe takes at once.
        pipe = open(what["reports"], "w", buffering=1)  # noqa: SIM115

        def tell(metric: profile.Metric, value: float) -> None:
            said = {"metric": metric, "value": value, "sent": network.sent, "lost": network.lost}
            pipe.write(json.dumps(said) + "\n")

        profile.listen(tell)
    sys.argv = argv[1:]
    # As `python SCRIPT`: modules that lie beside it are found.
    sys.path.insert(0, str(Path(argv[1]).resolve().parent))
    try:
        runpy.run_path(argv[1], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    if dist.is_initialized():
        dist.destroy_process_group()
    _end()


def _end() -> NoReturn:
    """End the process as Python does, but do not take the interpreter apart.

    A thread of PyTorch's that lets go of a tensor meanwhile aborts the process (its issue 190489),
    also one of a group that was destroyed and that a model still has. The training would count as
    failed.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its processes
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        # By its type: what a lazy module says of its class is an import.
        if issubclass(type(each), io.IOBase):
            # ValueError: it is closed, or detached.
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

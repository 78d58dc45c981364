"""One rank of Open MPI, as `mpirun` starts it: ``python -m fanin_lab.bench.openmpi_rank SOCKET``.

It does rounds as it is told through the socket. It has numpy's arrays and not torch's: eight
processes that import torch take longer than what is measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection

import numpy as np
from mpi4py import MPI

from fanin_lab.bench.message import Failed, Round, Timing, Verdict
from fanin_lab.bench.pattern import offset, pattern
from fanin_lab.netlab import tcp_retransmissions


def main(address: str) -> None:
    """Be that rank until the parent hangs up."""
    parent = Client(address, "AF_UNIX")
    parent.send(MPI.COMM_WORLD.rank)
    try:
        # EOFError, OSError: the parent has hung up.
        with contextlib.suppress(EOFError, OSError):
            _play(parent)
    except Exception:
        parent.send(Failed(traceback.format_exc()))
        os._exit(1)  # an orderly end would wait for ranks that wait for this one


def _play(parent: Connection) -> None:
    inputs: Inputs | None = None
    parent.send("joined")
    while True:
        round_, number = parent.recv()
        if inputs is None or inputs.of != round_:
            inputs = Inputs(round_, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        inputs.fill(number)
        parent.send("ready")
        begin: float = parent.recv()
        parent.send(_measure(inputs, begin))
        parent.send(inputs.verdict(number))


def _measure(inputs: Inputs, begin: float) -> Timing:
    resent = tcp_retransmissions()
    # The barrier, as in rank.py: a moment on the clock that all ranks share.
    time.sleep(max(0.0, begin - time.monotonic()))
    cpu = time.process_time()
    began = time.monotonic()
    for call in inputs.calls:
        if len(call) == 1:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, call[0])
        else:
            MPI.Request.Waitall(
                [MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, tensor) for tensor in call]
            )
    ended = time.monotonic()
    cpu = time.process_time() - cpu
    return Timing(began, ended, cpu, tcp_retransmissions() - resent)


class Inputs:
    """The arrays of a rank: the same numbers as fanin's and Gloo's."""

    def __init__(self, of: Round, rank: int, world_size: int) -> None:
        self.of = of
        self._world_size = world_size
        ramp = np.arange(of.elements, dtype=np.int32)
        self._sum = sum((pattern(each, ramp) for each in range(world_size)), np.zeros_like(ramp))
        self._mine = pattern(rank, ramp).astype(of.dtype)
        self.calls = [
            [np.empty(of.elements, dtype=of.dtype) for _ in range(of.buckets)]
            for _ in range(of.calls)
        ]

    def fill(self, number: int) -> None:
        """Write the inputs of that round."""
        for i, array in enumerate(self._arrays()):
            np.add(self._mine, offset(number, i), out=array, casting="unsafe")

    def verdict(self, number: int) -> Verdict:
        """Compare the sums of that round."""
        digest = hashlib.blake2b(digest_size=16)
        error = 0.0
        for i, array in enumerate(self._arrays()):
            digest.update(array.data)
            exact = self._sum + self._world_size * offset(number, i)
            worst = float(np.abs(array - exact).max())
            # A NaN must not compare as small.
            error = worst if not worst <= error else error
        return Verdict(digest.hexdigest(), error)

    def _arrays(self) -> list[np.ndarray]:
        return [array for call in self.calls for array in call]


if __name__ == "__main__":
    main(sys.argv[1])

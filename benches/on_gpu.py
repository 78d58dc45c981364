"""CUDA tensors through the host's memory, beside Gloo: `python benches/on_gpu.py`, on a GPU.

Ranks of one machine, which share a GPU where there is but one. Each row takes turns: CUDA tensors
on Gloo and on fanin, and what the way through the host costs at least: fanin's sum of as much in
the host's memory. Its last row trains with DDP. In milliseconds, the median of all turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

WAYS = (("gloo", "cuda"), ("fanin", "cuda"), ("fanin", "cpu"))
WARM_UP = 3
MIB = 1 << 20
WIDTH, LAYERS, BATCH = 4096, 6, 512
PLACES = ("one machine", "own machines")
"""Ranks sum in shared memory, or over sockets of this machine."""


def summing(device: torch.device, bytes_: int) -> Callable[[], object]:
    """Return what sums so many bytes once."""
    tensor = torch.zeros(bytes_ // 4, device=device)
    return lambda: dist.all_reduce(tensor)


def training(device: torch.device) -> Callable[[], object]:
    """Return a step of DDP."""
    layers = [nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def rank_(rank: int, size: int, port: int, place: str, pipe: Connection) -> None:
    """Be one rank: do what comes through the pipe, and tell how long it took."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if place == "own machines":
        os.environ["FANIN_MACHINE"] = f"machine {rank}"
    store = TCPStore("127.0.0.1", port, is_master=False)
    for turn, (backend, where, bytes_, rounds) in enumerate(iter(pipe.recv, None)):
        stored = PrefixStore(f"{turn}/", store)
        dist.init_process_group(backend, store=stored, rank=rank, world_size=size)
        on = device if where == "cuda" else torch.device("cpu")
        once = summing(on, bytes_) if bytes_ else training(on)
        times = []
        for number in range(WARM_UP + rounds):
            dist.barrier()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            once()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                times.append(time.perf_counter() - begun)
        pipe.send(times)
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 100])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} processors")
    heads = [f"{backend}, {where}" for backend, where in WAYS]
    print(f"| ranks | | what | {' | '.join(heads)} |\n|{'---|' * (3 + len(heads))}")
    context = multiprocessing.get_context("spawn")
    for size in given.ranks:
        for place in PLACES:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pipes, processes = [], []
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (rank, size, store.port, place, theirs)
                processes.append(context.Process(target=rank_, args=arguments))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            for bytes_ in [*(mib * MIB for mib in given.mib), 0]:
                ways = WAYS if bytes_ else WAYS[:2]
                taken: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
                for _ in range(given.turns):
                    for way in ways:
                        for pipe in pipes:
                            pipe.send((*way, bytes_, given.rounds))
                        of_ranks = [pipe.recv() for pipe in pipes]
                        taken[way] += [max(times) for times in zip(*of_ranks, strict=True)]
                what = f"{bytes_ // MIB} MiB" if bytes_ else "DDP, 403 MB"
                medians = [f"{1e3 * statistics.median(taken[way]):.1f}" for way in ways]
                print(f"| {size} | {place} | {what} | {' | '.join(medians)} |", flush=True)
            for pipe, process in zip(pipes, processes, strict=True):
                pipe.send(None)
                process.join()


if __name__ == "__main__":
    main()

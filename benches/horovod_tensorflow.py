"""How long ranks take to average ResNet-50's 161 gradients by TensorFlow and by PyTorch.

    fanin run -np 2 benches/horovod_tensorflow.py

Both use Horovod's interface, by turns, and compute nothing else. Rank 0 prints the medians of all
steps, and of the rounds' medians the least and the largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from horovod_steps import shapes

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def by_tensorflow(steps: int) -> list[float]:
    """Return the seconds of each step of a compiled function."""
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf
    from fanin.horovod.tensorflow.reduction import Reduction

    hvd.init()
    gradients = [tf.ones(shape) for shape in shapes()]
    reduce = Reduction(
        "step", hvd.Compression.none, False, hvd.Average, 1.0, None, hvd.global_process_set
    )
    step = tf.function(lambda: reduce(gradients, gradients))
    took = timed(step, hvd.barrier, steps)
    hvd.shutdown()
    return took


def by_torch(steps: int) -> list[float]:
    """Return the seconds of each step."""
    import fanin.horovod as hvd

    hvd.init()
    gradients = [torch.ones(shape) for shape in shapes()]

    def step() -> None:
        handles = [hvd.allreduce_async_(each, name=f"{i}") for i, each in enumerate(gradients)]
        for handle in handles:
            hvd.synchronize(handle)

    took = timed(step, hvd.barrier, steps)
    hvd.shutdown()
    return took


def timed(step: Callable[[], object], barrier: Callable[[], None], steps: int) -> list[float]:
    """Return the seconds of each step, after three for nothing."""
    took = []
    for count in range(steps + 3):
        barrier()
        began = time.perf_counter()
        step()
        if count >= 3:
            took.append(time.perf_counter() - began)
    return took


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [(by_tensorflow(args.steps), by_torch(args.steps)) for _ in range(args.rounds)]
    if os.environ.get("RANK", "0") != "0":
        return
    for name, of_rounds in zip(("TensorFlow", "PyTorch"), zip(*rounds, strict=True), strict=True):
        medians = [1000 * statistics.median(each) for each in of_rounds]
        every = 1000 * statistics.median([one for each in of_rounds for one in each])
        print(f"{name}: {every:.0f} ms a step ({min(medians):.0f} to {max(medians):.0f})")


if __name__ == "__main__":
    main()

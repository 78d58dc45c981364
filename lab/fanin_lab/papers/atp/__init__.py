"""The figures of Lao et al., "ATP: In-network Aggregation for Multi-tenant Learning", NSDI 2021."""

from __future__ import annotations

from fanin_lab.papers.atp import (
    accuracy,
    background,
    congestion,
    dumbbell,
    hashing,
    loss,
    overflow,
    packets,
    pairs,
    phases,
    rack_scale,
    sharing,
    single,
)
from fanin_lab.papers.finding import Paper

PAPER = Paper(
    [
        phases.EXPERIMENT,
        single.EXPERIMENT,
        rack_scale.EXPERIMENT,
        loss.EXPERIMENT,
        dumbbell.EXPERIMENT,
        sharing.EXPERIMENT,
        hashing.EXPERIMENT,
        congestion.EXPERIMENT,
        background.EXPERIMENT,
        pairs.EXPERIMENT,
        overflow.EXPERIMENT,
        accuracy.EXPERIMENT,
        accuracy.CONVERGENCE,
        packets.EXPERIMENT,
    ],
    repeated="seeds",
    repetitions=6,
    missing=[
        "Figures 11 and 18, the models: ImageNet is not trained here, but digits, a small GPT, and "
        "a residual network of 272,000 parameters on 5,000 images of MNIST. "
        "Their other axis, time: where the epochs are the same, its ratios are those of "
        "throughputs, which are rows of Figure 8.",
        "Figure 19, TSO (3 times) and multi-packet queues (1.47 times): they change what a packet "
        "costs a host, which the simulator is told and cannot find. Lengths of packets are made.",
        "§5.2.1, 2.5 times BytePS NtoN, 8.7 times BytePS Nto1 and 4.2 times Horovod, all over TCP: "
        "the CPU time of the kernel's TCP is not modelled.",
        "§5.3.1, §B.1 and Table 1, how often gradients of ResNet50, ResNet152, VGG16 and AlexNet "
        "overflow or are small: they need ImageNet. What is counted is of the networks above.",
    ],
)

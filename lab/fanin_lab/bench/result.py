"""The samples of a benchmark, and the figures that follow from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fanin._settings import Protocol, TravelsAs

from fanin_lab.bench.message import ALONE, OVER_TCP, Sum
from fanin_lab.bench.plan import Plan
from fanin_lab.bench.stage import Links, Sample

SLICED = ("reduce_scatter", "all_gather")
"""Collectives of one slice a rank."""


@dataclass(frozen=True)
class Setting:
    """The setting that was measured."""

    workers: int
    size_bytes: int
    """The size of all tensors of a call together."""
    dtype: str
    wire_dtype: TravelsAs
    """How fanin's floats travel."""
    element_bytes: int
    buckets: int
    calls: int
    links: Links | None
    """None: loopback."""
    protocol: Protocol = "switchml"
    """How fanin sums."""
    ranks_per_machine: int = 1
    """In the laboratory."""
    with_switch: bool = True
    """Whether there is a switch that has a link for every worker."""
    own_services: bool = True
    """Whether the ranks' machines may sum, too."""
    collective: str = "all_reduce"
    """By torch's name."""
    loss_bound: float = 0.0
    """The loss bound of the backend "bounded"; 0: there is none."""
    plan: Plan | None = None
    """None: the planner does not know the links."""
    step: tuple[Sum, ...] = ()
    """The sums of a training's step, in place of `buckets` equal ones."""

    @property
    def elements(self) -> int:
        """The elements of each tensor; slices count together, and each rank has as many.

        Of a step's tensors it is the longest one.
        """
        if self.step:
            return max(asked.elements for asked in self.step)
        elements = max(1, self.size_bytes // self.element_bytes // self.buckets)
        if self.collective in SLICED:
            elements = max(1, elements // self.workers) * self.workers
        return elements

    @property
    def elements_in_all(self) -> int:
        """The elements of a call."""
        return sum(asked.elements for asked in self.step) or self.elements * self.buckets

    @property
    def payload_bytes(self) -> int:
        """As `size_bytes`, in whole elements."""
        return self.elements_in_all * self.element_bytes

    @property
    def bound_s(self) -> float | None:
        """The time of the plan; without one, of the payload on a link. Headers are not in it.

        A step, which also computes, has none.

        With these shares nobody who sends every byte once can be faster; who rounds them to fewer
        can. None for other collectives than all-reduces, which are not planned.
        """
        if self.collective != "all_reduce" or self.step:
            return None
        if self.plan is not None:
            return self.plan.time_s
        if self.links is None or self.links.rate_bps is None:
            return None
        return 8 * self.payload_bytes / self.links.rate_bps


@dataclass(frozen=True)
class Figures:
    """A backend's figures in a setting."""

    samples: Sequence[Sample]
    median_s: float
    """Tensor aggregation time: of a call, all its tensors, on the slowest rank."""
    min_s: float
    max_s: float
    elements_per_s: float
    """Elements summed a second at the median (the SwitchML paper's ATE/s)."""
    bound_share: float | None
    ranks_cpu_s_per_gb: float
    """CPU seconds of all ranks together, with their own services, for 10^9 bytes of a rank's
    tensor."""
    switch_cpu_s_per_gb: float
    retransmissions: int
    error_max: float
    p99_s: float
    """The 99th percentile of the samples, the nearest rank: of fewer than 100 the longest."""
    lost_share: float
    """Which part of the contributions is not in the sums: the mean over the samples."""
    cores_a_machine: float
    """The cores that the ranks of a machine keep busy while they sum, at the median."""
    bulk_bps: float | None
    """The bits a second that TCP brought beside it, in its slower direction, at the median."""


@dataclass(frozen=True)
class Run:
    """All backends in one setting."""

    setting: Setting
    backends: Mapping[str, Figures]
    switch_peak_bytes: int | None = None
    """The most memory that one of the processes that only sum has held; None: there is none."""
    bulk_alone_bps: float | None = None
    """The bits a second of TCP's slower direction while nobody sums; None: there is no TCP."""

    @property
    def ratio(self) -> float | None:
        """How many times faster than Gloo fanin is, at the medians."""
        if not {"fanin", "gloo"} <= set(self.backends):
            return None
        return self.backends["gloo"].median_s / self.backends["fanin"].median_s

    @property
    def kept_share(self) -> float | None:
        """How fast fanin is beside TCP, as a fraction of how fast it is alone."""
        if ALONE not in self.backends:
            return None
        return self.backends[ALONE].median_s / self.backends["fanin"].median_s

    def as_json(self) -> dict[str, Any]:
        """Return it for `json.dumps`."""
        return {
            **asdict(self.setting),
            "place": "loopback" if self.setting.links is None else "laboratory",
            "elements": self.setting.elements_in_all,
            "payload_bytes": self.setting.payload_bytes,
            "bound_s": self.setting.bound_s,
            "ratio_to_gloo": self.ratio,
            "switch_peak_bytes": self.switch_peak_bytes,
            "bulk_alone_bps": self.bulk_alone_bps,
            "backends": {name: asdict(figures) for name, figures in self.backends.items()},
        }


def figures(setting: Setting, samples: Sequence[Sample]) -> Figures:
    """Work out the figures of one backend."""
    times = [sample.time_s for sample in samples]
    median = statistics.median(times)
    gigabytes = setting.payload_bytes * setting.calls * len(samples) / 1e9
    machines = setting.workers / setting.ranks_per_machine if setting.links else 1
    beside = [sample.bulk_bps for sample in samples if sample.bulk_bps is not None]
    return Figures(
        samples=samples,
        median_s=median,
        min_s=min(times),
        max_s=max(times),
        elements_per_s=setting.elements_in_all / median,
        bound_share=None if setting.bound_s is None else setting.bound_s / median,
        ranks_cpu_s_per_gb=sum(sample.ranks_cpu_s for sample in samples) / gigabytes,
        switch_cpu_s_per_gb=sum(sample.switch_cpu_s for sample in samples) / gigabytes,
        retransmissions=sum(sample.retransmissions for sample in samples),
        error_max=max(sample.error_max for sample in samples),
        p99_s=sorted(times)[math.ceil(0.99 * len(times)) - 1],
        lost_share=statistics.fmean(sample.lost_share for sample in samples),
        cores_a_machine=statistics.median(
            sample.ranks_cpu_s / (sample.time_s * setting.calls) / machines for sample in samples
        ),
        bulk_bps=statistics.median(beside) if beside else None,
    )


def error_allowed(
    backend: str, epsilon: float, workers: int, largest: int, wire_dtype: TravelsAs
) -> float:
    """Return how far from the exact sum an element may be.

    ``largest`` is the largest absolute value of an input; ``epsilon`` is the dtype's, and 0 that of
    an integer.
    """
    if epsilon == 0:
        return 0.0
    sum_largest = workers * largest
    if backend in OVER_TCP:
        # Each of the n - 1 additions rounds by at most half an epsilon of what is there by then.
        return (workers - 1) * epsilon / 2 * sum_largest
    if wire_dtype == "native":
        # The additions are of whole numbers, in float32 at least: they round nothing.
        return epsilon / 2 * sum_largest
    power = 1 << (largest - 1).bit_length()  # 2^m
    if wire_dtype == "bfloat16":
        # docs/protocols/switchml.md: each contribution is rounded to bfloat16 and to 2^-k, and the
        # sum to bfloat16.
        factor = 2**30 / (1 << (workers - 1).bit_length()) / power  # 2^k
        contributions = 2**-8 * sum_largest + workers / factor / 2
        rounded_once = contributions + (2**-8 + 2**-23) * (sum_largest + contributions)
        return rounded_once + epsilon / 2 * (sum_largest + rounded_once)
    if wire_dtype in ("int8", "int4"):
        # docs/protocols/switchml.md: each contribution is rounded by less than the distance of two
        # levels, and the sum, which is in float32. Nothing is known of an element's own magnitude.
        distance = 1 / 63.5 if wire_dtype == "int8" else 1 / 2
        contributions = sum_largest * (1 + workers * 2**-24) * distance
        rounded_once = contributions + (sum_largest + contributions) * distance
        return rounded_once + epsilon / 2 * (sum_largest + rounded_once)
    # SwitchML, Appendix E, Theorem 1: n / f, where f = (2^31 - 1) / (n 2^m) and no input exceeds
    # 2^m; and the sum is rounded to the dtype. ATP has the same factor, and rounds to nearest (its
    # §B.3).
    return workers**2 * power / (2**31 - 1) + epsilon / 2 * sum_largest

"""The figures, for people."""

from __future__ import annotations

from itertools import groupby

from fanin_lab.bench.message import ALONE, OVER_TCP
from fanin_lab.bench.plan import Plan
from fanin_lab.bench.result import Figures, Run, Setting
from fanin_lab.units import shown_rate, shown_size, shown_time

_TIMES = ("median", "min", "p99", "max")
_HEAD = ("", *_TIMES, "elements/s", "of bound", "ranks", "switch", "resent", "lost", "error")


def title(setting: Setting) -> str:
    """Return the setting in a line."""
    links = setting.links
    where = "loopback" if links is None else links.shown()
    if setting.ranks_per_machine > 1:
        where = f"{setting.ranks_per_machine} on each machine, {where}"
    if not setting.with_switch:
        where += ", own services" if setting.own_services else ", no service of their own"
    # Without switches and spare machines, no other plan is possible.
    is_chosen = setting.with_switch or (links is not None and links.spares > 0)
    if is_chosen and setting.plan is not None and setting.plan.asked != "auto":
        where += f", plan {setting.plan.asked}"
    tensors = f" in {setting.buckets} tensors" if setting.buckets > 1 else ""
    usual = setting.wire_dtype in ("native", "integers")
    wire = "" if usual else f" sent as {setting.wire_dtype}"
    wire += f" by {setting.protocol}" if setting.protocol != "switchml" else ""
    wire += f", bounded may lose {100 * setting.loss_bound:g} %" if setting.loss_bound else ""
    what = "" if setting.collective == "all_reduce" else f"{setting.collective} of "
    if setting.step:
        what = f"a step that asks last after {shown_time(setting.step[-1].ready_s)}, of "
        tensors = f" in {len(setting.step)} tensors" if len(setting.step) > 1 else ""
    calls = f", {setting.calls} calls a round" if setting.calls > 1 else ""
    return (
        f"{setting.workers} workers, {where}: {what}"
        f"{shown_size(setting.payload_bytes)} of {setting.dtype}{wire}{tensors}{calls}"
    )


def table(run: Run) -> str:
    """Return the setting's figures as a table."""
    bound = run.setting.bound_s
    rows = [_HEAD, *(_row(name, figures) for name, figures in run.backends.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(0, title(run.setting) + ("" if bound is None else f"; bound {shown_time(bound)}"))
    if run.setting.plan is not None:
        lines.insert(1, _plan(run.setting.plan))
    if run.ratio is not None:
        lines.append(f"fanin is {run.ratio:.2f} times as fast as Gloo")
    if run.bulk_alone_bps is not None:
        lines += _beside_tcp(run, run.bulk_alone_bps)
    if run.switch_peak_bytes is not None:
        lines.append(f"what only sums has held {shown_size(run.switch_peak_bytes)} at most")
    return "\n".join(lines)


LEGEND = """\
times: of one collective or step, on the slowest rank; bound: what the links take at least for the
payload, summed where the plan says; ranks, switch: CPU seconds a gigabyte, all ranks together, and
all that only sums; resent: packets in all rounds; lost: of the contributions, with a loss bound;
error: the largest absolute one in any sum."""


def _plan(plan: Plan) -> str:
    shares = [(name, f"{100 * share:.4g} %") for name, share in plan.shares.items() if share]
    alike = (list(of_kind) for _, of_kind in groupby(shares, lambda one: (one[0][0], one[1])))
    shown = ", ".join(
        f"{some[0][0]} .. {some[-1][0]} {some[0][1]} each" if len(some) > 1 else " ".join(some[0])
        for some in alike
    )
    return f"plan: {shown}; all wait for {plan.bound}; a ring takes {shown_time(plan.ring_s)}"


def _beside_tcp(run: Run, alone_bps: float) -> list[str]:
    """Say how fast TCP is beside each backend, and fanin beside TCP."""
    lines = [f"TCP brings {shown_rate(round(alone_bps))} while nobody sums (its slower direction)"]
    for name, figures in run.backends.items():
        if figures.bulk_bps is not None:
            lines.append(
                f"beside {name} it brings {shown_rate(round(figures.bulk_bps))}, "
                f"{figures.bulk_bps / alone_bps:.0%} of that"
            )
    if run.kept_share is not None:
        lines.append(f"beside TCP fanin is {run.kept_share:.2f} times as fast as {ALONE}")
    return lines


def _row(name: str, figures: Figures) -> tuple[str, ...]:
    return (
        name,
        shown_time(figures.median_s),
        shown_time(figures.min_s),
        shown_time(figures.p99_s),
        shown_time(figures.max_s),
        f"{figures.elements_per_s:.3g}",
        "-" if figures.bound_share is None else f"{100 * figures.bound_share:.1f} %",
        f"{figures.ranks_cpu_s_per_gb:.2f}",
        f"{figures.switch_cpu_s_per_gb:.2f}" if name not in OVER_TCP else "-",
        str(figures.retransmissions),
        f"{100 * figures.lost_share:.2f} %" if figures.lost_share else "0",
        f"{figures.error_max:.1e}" if figures.error_max else "0",
    )

"""`fanin profile loss-tolerance SCRIPT`: the options, and what is written."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fanin import _signals

from fanin_lab import commands, units
from fanin_lab.profiler import ProfileError, picture
from fanin_lab.profiler.drops import AMONG, LAYERS, MAGNITUDES, Among, Losses
from fanin_lab.profiler.tolerance import MARGIN, bound, cost, verdict
from fanin_lab.profiler.trials import Training, Trials
from fanin_lab.sweep.progress import Progress, progress
from fanin_lab.sweep.spread import BOUNDING, Spread, in_brackets

FORMAT = 1
"""The JSON's version. A field may be added without a new number."""
PROBABILITIES = (0.003, 0.01, 0.03, 0.1, 0.3)

DESCRIPTION = """\
Trains SCRIPT again and again, with packets of its gradients lost, and finds up to which loss it
takes no more epochs to --target: the bound of its loss tolerance (DLCP, section 2.3). First without
loss; then with packets lost among all, among a fifth of the layers (front, middle, back), and among
the fifth of least, medium and largest magnitude, each with the probabilities of --loss in order,
until one costs epochs. The script says after each epoch how well it does, in one line:

  fanin.profile.report(accuracy=right / count)       or (loss=...); does nothing elsewhere

With --nproc-per-node each rank's packets are lost before DistributedDataParallel sums them, and the
mean is over those that came; without, the process is the only worker, and what is lost is 0.
In the folder of --out: README.md (the tables and the setting), profile.json, profile.png, logs."""

EXAMPLES = """\
examples:
  fanin profile loss-tolerance --target 0.9 train.py --lr 0.1
  fanin profile loss-tolerance --target 0.9 --nproc-per-node 4 train.py      a DDP script
  fanin profile loss-tolerance --target 2.1 --among all --loss 1%,10% train.py
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    made = argparse.ArgumentParser(
        prog="fanin profile loss-tolerance",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--target",
        type=float,
        required=True,
        metavar="X",
        help="the accuracy or loss that counts as trained; every training without loss reaches it, "
        "and none before its second epoch",
    )
    made.add_argument(
        "--loss",
        type=_probabilities,
        default=PROBABILITIES,
        metavar="P,...",
        help="probabilities that a packet is lost, as 1%% or 0.01 (default: "
        + ",".join(_percent(p) for p in PROBABILITIES).replace("%", "%%")
        + ")",
    )
    made.add_argument(
        "--among",
        type=_groups,
        default=AMONG,
        metavar="GROUP,...",
        help=f"of which packets: {', '.join(AMONG)} (default: each of them)",
    )
    made.add_argument(
        "--seeds",
        type=_several,
        default=BOUNDING,
        metavar="N",
        help="trainings of each kind (default: %(default)s, the least of which there is a 95 %% "
        "interval)",
    )
    made.add_argument(
        "--nproc-per-node",
        type=units.positive_number,
        metavar="N",
        help="train with N ranks under torchrun (default: one process, without torchrun)",
    )
    made.add_argument(
        "--jobs",
        type=units.positive_number,
        default=1,
        metavar="N",
        help="trainings at a time (default: %(default)s)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("loss-tolerance"),
        metavar="DIR",
        help="(default: %(default)s)",
    )
    made.add_argument("script", metavar="SCRIPT", help="a Python file that trains")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return made


def main(argv: list[str]) -> int:
    """Run `fanin profile loss-tolerance ARGV` and return its exit status."""
    options = parser()
    args = options.parse_args(argv)
    if not os.path.isfile(args.script):
        options.error(f"there is no file {args.script}")
    command = ["fanin", "profile", "loss-tolerance", *argv]
    return commands.status("fanin profile", lambda: _run(args, command))


@dataclass(frozen=True)
class Profile:
    """How much loss a script forgives."""

    without_loss: Sequence[Training]
    """By seed, as everywhere."""
    found: Mapping[Among, Mapping[float, Sequence[Training]]]

    def costs(self, among: Among) -> dict[float, Spread]:
        """Return which part of the epochs each probability costs in addition.

        Not of those at which some training happened to lose nothing: they say nothing.
        """
        before = [training.epochs for training in self.without_loss]
        return {
            probability: cost([training.epochs for training in of_seeds], before)
            for probability, of_seeds in self.found[among].items()
            if all(training.lost for training in of_seeds)
        }

    def bound(self, among: Among) -> tuple[float, float]:
        """Return between which probabilities the bound is."""
        return bound(self.costs(among))


def measured(
    trials: Trials,
    among: Sequence[Among],
    probabilities: Sequence[float],
    seeds: Sequence[int],
    jobs: int,
    bar: Progress,
) -> Profile:
    """Train with all losses. Raises `ProfileError` where the trainings say too little."""
    with ThreadPoolExecutor(jobs) as pool:

        def trained(losses: Losses) -> list[Training]:
            bar.expect(len(seeds))

            def one(seed: int) -> Training:
                training = trials.run(losses, seed)
                bar.done(f"{losses.among} {_percent(losses.probability)}")
                return training

            return list(pool.map(one, seeds))

        try:
            without_loss = trained(Losses())
            refuse_without_use(without_loss)
            found: dict[Among, dict[float, list[Training]]] = {}
            for group in among:
                of_group = found.setdefault(group, {})
                for probability in probabilities:
                    of_group[probability] = trained(Losses(group, probability))
                    costs = Profile(without_loss, found).costs(group)
                    if any(verdict(cost) == "costs epochs" for cost in costs.values()):
                        break
        finally:
            trials.stop()
            pool.shutdown(cancel_futures=True)
    return Profile(without_loss, found)


def refuse_without_use(without_loss: Sequence[Training]) -> None:
    """Raise `ProfileError` where trainings without loss are none to compare with."""
    sign = 1 if without_loss[0].metric == "accuracy" else -1
    best = [sign * max(sign * value for value in training.curve) for training in without_loss]
    if not all(math.isfinite(training.epochs) for training in without_loss):
        shown = ", ".join(f"{value:.4g}" for value in best)
        raise ProfileError(
            f"without loss not every training reaches the target; the best of each: {shown}; take "
            "an easier --target, or more epochs"
        )
    if any(len(training.curve) == 1 for training in without_loss):
        raise ProfileError(
            "a training without loss reaches the target in its first epoch, where no difference "
            "would be seen; take a harder --target, or let the script report more often"
        )
    if len({tuple(training.curve) for training in without_loss}) == 1:
        raise ProfileError(
            "the script trains the same with every seed, so that the noise of its training is not "
            "known; let it seed by torch.manual_seed, which differs from training to training"
        )


def _run(args: argparse.Namespace, command: list[str]) -> int:
    commands.require(ProfileError, "matplotlib", "rich", "torch")
    args.out.mkdir(parents=True, exist_ok=True)
    script = [args.script, *args.arguments]
    trials = Trials(script, args.nproc_per_node, args.target, args.jobs, args.out)
    with _signals.as_exit(), progress() as bar:
        seeds = range(args.seeds)
        found = measured(trials, args.among, args.loss, seeds, args.jobs, bar)
    picture.save(found, Path(args.script).name, args.out / "profile.png")
    document = {
        "format": FORMAT,
        "command": shlex.join(command),
        "target": args.target,
        "metric": found.without_loss[0].metric,
        "margin": MARGIN,
        "without_loss": [vars(training) for training in found.without_loss],
        "found": {
            group: {
                "bound": [_finite(end) for end in found.bound(group)],
                "losses": [
                    {
                        "probability": probability,
                        **_judged(found.costs(group).get(probability)),
                        "trainings": [
                            {**vars(one), "epochs": _finite(one.epochs)} for one in of_seeds
                        ],
                    }
                    for probability, of_seeds in of_group.items()
                ],
            }
            for group, of_group in found.found.items()
        },
    }
    (args.out / "profile.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    page = _page(found, Path(args.script).name, document["command"], args.target)
    (args.out / "README.md").write_text(page)
    print(page, end="")
    print(f"\nplot, JSON and what the script said are in {args.out}")
    return 0


def _judged(costs: Spread | None) -> dict[str, object]:
    if costs is None:
        return {"verdict": None, "cost": None}
    ends = [_finite(value) for value in (costs.median, *costs.interval)]
    return {"verdict": verdict(costs), "cost": ends}


def _page(found: Profile, script: str, command: str, target: float) -> str:
    lossless = Spread.of([training.epochs for training in found.without_loss])
    seeds = len(found.without_loss)
    packets = found.without_loss[0].sent / len(found.without_loss[0].curve)
    page = (
        f"# Loss tolerance of {script}\n\n`{command}`\n\n"
        f"Without loss {found.without_loss[0].metric} {target:g} is reached after "
        f'{_epochs(lossless)} epochs, with {packets:.0f} packets each (of rank 0). A loss is "as '
        f'without loss" if all of its interval is at most {100 * MARGIN:g} % more epochs, seed by '
        f"seed; it costs epochs if none is. Medians of {seeds} seeds, {in_brackets(seeds)} in "
        "brackets.\n\n"
    )
    if "all" in found.found:
        tolerated, costly = found.bound("all")
        page += _table_1(script, tolerated, costly) + "\n"
    page += "| lost among | probability | lost of all | epochs more | verdict |\n"
    page += "|---|---|---|---|---|\n"
    for group in AMONG:
        if group not in found.found:
            continue
        costs = found.costs(group)
        for probability, of_seeds in found.found[group].items():
            lost = sum(one.lost for one in of_seeds) / sum(one.sent for one in of_seeds)
            cells = [group, _percent(probability), _percent(lost)]
            if probability in costs:
                cells += [_more(costs[probability]), verdict(costs[probability])]
            else:
                cells += ["", "some training has lost nothing"]
            page += f"| {' | '.join(cells)} |\n"
    page += _bounds(found)
    if "all" in found.found:
        page += _setting(*found.bound("all"))
    return page


def _table_1(script: str, tolerated: float, costly: float) -> str:
    """Return the script's place in Table 1."""
    columns = {"0%-1%": tolerated < 0.01, "1%-2%": 0.01 <= tolerated <= 0.02}
    columns[">2%"] = tolerated > 0.02
    model = f"{script} ({_between(tolerated, costly)})"
    cells = [model if here else "" for here in columns.values()]
    head = f"| bounded loss ratio | {' | '.join(columns)} |\n|---|---|---|---|\n"
    return f"{head}| model | {' | '.join(cells)} |\n"


def _bounds(found: Profile) -> str:
    lines = [
        f"- {group}: {_between(*found.bound(group))}\n"
        for group in (*LAYERS, *MAGNITUDES)
        if group in found.found
    ]
    if not lines:
        return ""
    return "\nBounds among a fifth of the layers, and a fifth by magnitude:\n\n" + "".join(lines)


def _setting(tolerated: float, costly: float) -> str:
    text = f"\nThe loss bound to use: {tolerated:g}\n"
    if tolerated == 0 and math.isinf(costly):
        return text + "(no loss was shown to cost nothing, nor to cost epochs: take more --seeds)\n"
    if tolerated == 0:
        return text + "(no loss was shown to cost nothing: try less, by --loss, or more --seeds)\n"
    if math.isinf(costly):
        return text + "(no loss that was tried was shown to cost epochs: try more, by --loss)\n"
    return text


def _between(tolerated: float, costly: float) -> str:
    if math.isinf(costly):
        return f"at least {_percent(tolerated)}" if tolerated else "not known"
    return f"{_percent(tolerated)} to {_percent(costly)}"


def _more(costs: Spread) -> str:
    low, high = costs.interval
    shown = f"{_part(costs.median)} %"
    return shown if low == high else f"{shown} ({_part(low)} to {_part(high)})"


def _part(value: float) -> str:
    return f"{100 * value:+.1f}" if math.isfinite(value) else "never"


def _epochs(spread: Spread) -> str:
    low, high = spread.interval
    return f"{spread.median:.3g}" + ("" if low == high else f" ({low:.3g} to {high:.3g})")


def _percent(part: float) -> str:
    return f"{100 * part:.3g}%"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _several(text: str) -> int:
    number = units.positive_number(text)
    if number < 2:
        raise argparse.ArgumentTypeError("1: with one training the noise is not known; at least 2")
    return number


def _probabilities(text: str) -> list[float]:
    def probability(one: str) -> float:
        try:
            value = float(one[:-1]) / 100 if one.endswith("%") else float(one)
        except ValueError:
            value = math.nan
        if not 0 < value < 1:
            raise argparse.ArgumentTypeError(f"{one!r} is no probability; write 1% or 0.01")
        return value

    return sorted({probability(one) for one in text.split(",")})


def _groups(text: str) -> list[Among]:
    said = text.split(",")
    if unknown := set(said) - set(AMONG):
        text = f"{', '.join(sorted(unknown))}: no such group; choose from {', '.join(AMONG)}"
        raise argparse.ArgumentTypeError(text)
    return [group for group in AMONG if group in said]

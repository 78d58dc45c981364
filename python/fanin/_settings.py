"""What a rank can be told about its job: one table of settings, and how one of them is chosen.

`Settings` is the table. A field's name is the keyword argument (`fanin.connect`, `Options`,
`HookState`); FANIN_ and the name in capitals is the environment variable; the name with dashes is
the flag of `fanin run`. An argument goes before the environment, that before the default.
"""

# The fields below are made by `_row`, whose metadata nobody changes.
# ruff: noqa: RUF009

from __future__ import annotations

import argparse
import ipaddress
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias, TypedDict, Unpack, get_args

Packed: TypeAlias = Literal["int8", "int4"]
WireDtype: TypeAlias = Literal["native", "shared_exponent", "bfloat16", "int8", "int4"]
Security: TypeAlias = Literal["tag", "authenticate", "encrypt"]
TravelsAs: TypeAlias = WireDtype | Literal["integers"]
"""ATP and GOAT have integers of their own."""
PACKED: Final[tuple[Packed, ...]] = get_args(Packed)
"""Floats are rounded so coarsely by these that the error is worth keeping for the next step."""
Protocol: TypeAlias = Literal["switchml", "atp", "goat"]
Plan: TypeAlias = Literal["auto", "switch", "own"]

IN_FLIGHT_MAX = 16384
SUB_MODELS_MAX = 256
SUB_MODEL_ELEMENTS_MAX = 2**29
PATHS_MAX = 16

# The doctor needs them itself, before it can ask a switch.
OF_DOCTOR = ("tls_ca", "secret_file")

# No setting of a job: it is looked at before there is one.
AS_VARIABLE = "FANIN_AS"


class Said(TypedDict, total=False):
    """The settings but `switch`, as keyword arguments: what is left out, or None, is not said."""

    job: str | None
    in_flight: int | None
    sub_models: str | None
    wire_dtype: WireDtype | None
    security: Security | None
    protocol: Protocol | None
    loss_bound: float | None
    paths: int | None
    congestion_control: bool | None
    trace: str | os.PathLike[str] | None
    page: str | int | None
    plan: Plan | None
    rate: str | int | None
    machine: str | None
    tls_ca: str | os.PathLike[str] | None
    secret_file: str | os.PathLike[str] | None


# Parsers take text without blanks around it. Their errors go on where "X is 'text': " ends.


def _name(text: str) -> str:
    if not text.isprintable() or not text:
        raise ValueError("it must be a printable name")
    return text


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"it must be {' or '.join(json.dumps(name) for name in names)}")
        return text

    return parse


def _wire_dtype(text: str) -> str:
    if text == "int32":
        raise ValueError(
            'it is called "shared_exponent" now; by default floats travel as they are ("native")'
        )
    if text in ("exact", "float32"):
        raise ValueError('it is called "native": floats travel as they are')
    return _one_of(*get_args(WireDtype))(text)


def _up_to(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isdecimal() and 1 <= int(text) <= most):
            raise ValueError(f"it must be a number from 1 to {most}")
        return int(text)

    return parse


def _yes(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _addresses(text: str) -> str:
    from fanin import _fanin  # not for FANIN_AS alone, which `import torch` looks at

    addresses = [_fanin.switch_address(part) for part in text.split(",")]
    if len(set(addresses)) < len(addresses):
        raise ValueError("it names a switch twice")
    return ",".join(addresses)


def _sub_models(text: str) -> str:
    parts = [part.strip() for part in text.split(",")]
    sizes = [int(part) if part.isdecimal() else 0 for part in parts]
    if len(sizes) > SUB_MODELS_MAX or not all(0 < n <= SUB_MODEL_ELEMENTS_MAX for n in sizes):
        raise ValueError(
            f"it must be the elements of at most {SUB_MODELS_MAX} parts of the model, each "
            "1..2^29, such as 250000,250000 (fanin.torch.sub_models makes them)"
        )
    return ",".join(map(str, sizes))


ASSUMED: Final = "assumed"
"""The rate of links that are not to be measured."""


def _rate(text: str) -> int | Literal["assumed"]:
    from fanin import _fanin

    if text == ASSUMED:
        return ASSUMED
    try:
        return _fanin.rate_bps(text)
    except ValueError as error:
        raise ValueError(f"it must be a rate, and {error}") from None


LOSS_BOUND_LEAST = 0.002
"""One packet of the 512 that a flow has (`control/flow_plan.rs`)."""


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise ValueError("it must be a fraction of at least 0 and below 1, such as 0.01")
    if 0 < fraction < LOSS_BOUND_LEAST:
        raise ValueError(
            f"below {LOSS_BOUND_LEAST} it forgives nothing, as it holds for each 512 packets: "
            f"it must be 0, or {LOSS_BOUND_LEAST} and more"
        )
    return fraction


def _page(text: str) -> str:
    address, colon, port = text.rpartition(":")
    if not colon:
        address = "127.0.0.1"
    try:
        ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError("it must be a port, or ADDR:PORT with an IP address") from None
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError("it must end with a port from 1 to 65535")
    return f"{address}:{port}"


def _file(text: str) -> str:
    if not text or text.endswith("/") or not Path(text).name or Path(text).is_dir():
        raise ValueError("it must name a file")
    return text


def _row(
    parse: Callable[[str], object],
    default: object,
    form: str,
    meaning: str,
    *only: Protocol,
    others: str | None = None,
    of_others: Sequence[str] = (),
) -> Any:
    """Describe a setting; `others` says why another protocol has it not, but for `of_others`."""
    if only:
        meaning = f"{', '.join(only)}: {meaning}"
    told = {"parse": parse, "form": form, "meaning": meaning, "only": only}
    told |= {"others": others, "of_others": of_others}
    return field(default=default, metadata=told)


@dataclass(frozen=True)
class Settings:
    """What holds for one membership.

    Ranks of one job agree on all but `switch`, `trace`, `page`, `rate`, `machine` and `paths`; the
    files `tls_ca` and `secret_file` may be elsewhere on each machine.
    """

    switch: str | None = _row(
        _addresses, None, "HOST:PORT[,..]", "the switches that sum, besides the ranks' own services"
    )
    job: str | None = _row(
        _name, None, "NAME", "the job's name, as status, metrics and logs show it"
    )
    in_flight: int | None = _row(
        _up_to(IN_FLIGHT_MAX),
        None,
        f"1..{IN_FLIGHT_MAX}",
        "packets that a rank may have in flight: with switchml, slots in each of the switch's "
        "shards; with atp and goat, fragments in each",
    )
    sub_models: str | None = _row(
        _sub_models,
        None,
        "N[,..]",
        "elements of each part of the model that is planned by itself",
        "goat",
    )
    wire_dtype: WireDtype | None = _row(
        _wire_dtype,
        None,
        "|".join(get_args(WireDtype)),
        "how large float tensors travel: native (usual), as they are; shared_exponent, as integers "
        "with an exponent a packet (352 to 2,048 elements), which a NaN spoils; bfloat16, in half "
        "the bytes, and eight significant bits (of atp and goat, too); int8, in a quarter, and "
        "within 1/63 of the largest of 32 neighbours; int4, in an eighth, and within 1/6 of the "
        "largest of 32 neighbours, or within half of the element",
        "switchml",
        others="which adds integers, and makes them of floats by a factor of its own, which "
        "travel as they are or as bfloat16",
        of_others=("bfloat16",),
    )
    security: Security = _row(
        _one_of(*get_args(Security)),
        "tag",
        "|".join(get_args(Security)),
        "how packets are secured: tag, who has not the job's key sends none that counts; "
        "authenticate, and nobody changes one on its way; encrypt, and nobody reads one",
    )
    protocol: Protocol = _row(
        _one_of("switchml", "atp", "goat"),
        "switchml",
        "switchml|atp|goat",
        "how gradients are summed: in one switch, with atp on the way to a server, or with goat "
        "there by a plan",
    )
    loss_bound: float = _row(
        _fraction,
        0.0,
        "0..1",
        "what each rank's part of a float tensor may lose on a network that loses; 0: nothing",
        "switchml",
    )
    paths: int = _row(
        _up_to(PATHS_MAX),
        1,
        f"1..{PATHS_MAX}",
        "with a loss bound: source ports that a rank's packets take in turn, for routers with "
        "several equal paths",
        "switchml",
    )
    congestion_control: bool = _row(
        _yes,
        True,
        "0|1",
        "send less when packets are marked or lost; 0 where nothing is marked, and links lose "
        "packets without being full",
        "atp",
        "goat",
    )
    trace: str | None = _row(
        _file, None, "FILE", "a timeline of each rank, FILE with the rank before its suffix"
    )
    page: str | None = _row(
        _page,
        None,
        "PORT|ADDR:PORT",
        "rank 0 serves a page about the job here: a port of 127.0.0.1, or another address with a "
        "token (FANIN_PAGE_TOKEN_FILE)",
    )
    plan: Plan = _row(
        _one_of("auto", "switch", "own"),
        "auto",
        "auto|switch|own",
        "who sums: what takes the least time, the switches alone, or the ranks' own services",
        "switchml",
    )
    rate: int | Literal["assumed"] | None = _row(
        _rate,
        None,
        "RATE|assumed",
        "what this machine's link carries each way, such as 1gbit; assumed: links that tell no "
        "rate are not measured, and are taken for equal",
    )
    machine: str | None = _row(
        _name, None, "NAME", "ranks of the same name are on one machine, whatever it looks like"
    )
    tls_ca: str | None = _row(
        _file, None, "FILE", "certificates of those who vouch for the switches"
    )
    secret_file: str | None = _row(
        _file, None, "FILE", "a secret that the ranks and switches have, and nobody else"
    )

    @classmethod
    def of(cls, switch: str | None = None, **said: Unpack[Said]) -> Settings:
        """Take what is said, then the environment, then the defaults.

        Raises `ValueError`, which names the argument or the variable, for what is no such setting,
        and for what the protocol does not know.
        """
        return cls._taken({"switch": switch, **said}, lambda name: name)

    @classmethod
    def of_flags(cls, flags: argparse.Namespace) -> Settings:
        """As `of`, where the arguments are what `add_flags` read from a command line."""
        said = {row.name: getattr(flags, row.name, None) for row in fields(cls)}
        return cls._taken(said, flag)

    @classmethod
    def _taken(cls, said: Mapping[str, object], called: Callable[[str], str]) -> Settings:
        for _, _, wrong in _gone():
            raise ValueError(wrong)
        choices = list(_choices(said, called))
        protocol = _protocol(choices)
        return cls(**{c.name: _held_to(protocol, c) for c in choices if c.text is not None})

    @property
    def rate_bps(self) -> int | None:
        """What this machine's link carries, if that was said."""
        return None if self.rate == ASSUMED else self.rate

    @property
    def travels_as(self) -> TravelsAs:
        """How large float tensors travel, said or not."""
        return self.wire_dtype or ("native" if self.protocol == "switchml" else "integers")

    def at(self, switch: str | None) -> Settings:
        """Return these settings with another switch, or none; raises `ValueError` as `of`."""
        named = None if switch is None else _parsed(Choice("switch", switch, "switch"))
        return replace(self, switch=named)

    def of_own_services(self) -> Settings:
        """Return what holds for the ranks' own services beside another protocol.

        They are as secure, and on the same links. Sums are SwitchML's own: no float is rounded for
        its way, and nothing is lost.
        """
        # A window of fragments is no number of slots.
        others = ["switch", "protocol", "in_flight"]
        others += [row.name for row in fields(self) if row.metadata["only"]]
        return replace(self, **{name: getattr(Settings(), name) for name in others})

    def encode(self) -> str:
        """Return a text from which `decode` makes these settings again, on any machine."""
        values = ((row.name, getattr(self, row.name)) for row in fields(self))
        texts = {name: _text(name, value) for name, value in values if value is not None}
        return json.dumps(texts)

    @classmethod
    def decode(cls, text: str) -> Settings:
        """Return the settings of which `encode` made the text; reads no environment."""
        texts: dict[str, str] = json.loads(text)
        return cls(**{name: _parsed(Choice(name, text, name)) for name, text in texts.items()})


class Choice(NamedTuple):
    """Who decided about a setting."""

    name: str
    text: str | None
    """None: it has its default."""
    source: str
    """The argument, the flag, or the variable; "default"."""
    overruled: str | None = None
    """The variable that says otherwise, with its text."""


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"FANIN_{name.upper()}"


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return f"--{name.replace('_', '-')}"


def add_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Give a command the settings, or those of the names, as flags; None where not given."""
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for gone in _GONE:
        if not names or gone.now in names:
            parser.add_argument(*gone.flags, nargs="?", const="", type=gone.refuse, **hidden)
    for row in fields(Settings):
        if names and row.name not in names:
            continue
        usual = "" if row.default is None else f", else {_text(row.name, row.default)}"
        form: dict[str, Any] = {"metavar": row.metadata["form"]}
        if isinstance(row.default, bool):
            form = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(
            flag(row.name),
            default=None,
            help=f"{row.metadata['meaning']} (default: ${variable(row.name)}{usual})",
            **form,
        )


def exported(flags: argparse.Namespace) -> dict[str, str]:
    """Return the flags that were given as environment variables, for the ranks to inherit."""
    said = ((row.name, getattr(flags, row.name)) for row in fields(Settings))
    return {variable(name): _text(name, value) for name, value in said if value is not None}


def for_doctor(argv: list[str]) -> list[str]:
    """Turn flags of settings into what the doctor, who knows no settings, is told of them.

    Also of those that the environment decides. The switch is the doctor's own.
    """
    names = [row.name for row in fields(Settings) if row.name != "switch"]
    parser = argparse.ArgumentParser("fanin doctor", add_help=False, allow_abbrev=False)
    add_flags(parser, *names)
    flags, others = parser.parse_known_args(argv)
    choices = list(_choices(vars(flags), flag))
    try:
        protocol = _protocol(choices)
    except ValueError:
        protocol = None  # said where the protocol's own turn comes
    told = [_told(choice, protocol) for choice in choices if choice.name in names]
    told += [
        {"name": name, "source": source, "overruled": None, "wrong": wrong}
        for name, source, wrong in _gone()
    ]
    own = [
        part
        for name in OF_DOCTOR
        if (value := getattr(flags, name)) is not None
        for part in (flag(name), value)
    ]
    return [*others, *own, "--settings", json.dumps(told)]


def _told(choice: Choice, protocol: Protocol | None) -> dict[str, str | None]:
    told: dict[str, str | None] = {"name": choice.name, "overruled": choice.overruled}
    if choice.text is None:
        usual = Settings(protocol=protocol or Settings().protocol)
        is_wire = choice.name == "wire_dtype"
        default = usual.travels_as if is_wire else getattr(usual, choice.name)
        return told | {"value": None if default is None else _text(choice.name, default)}
    told |= {"value": choice.text, "source": choice.source}
    try:
        _held_to(protocol, choice)
    except ValueError as error:
        told["wrong"] = str(error)
    return told


def _choices(said: Mapping[str, object], called: Callable[[str], str]) -> Iterator[Choice]:
    unknown = said.keys() - {row.name for row in fields(Settings)}
    for gone in _GONE:
        if gone.name in unknown:
            raise TypeError(f"there is no setting {gone.name!r} any more: {gone.cure}")
    if unknown:
        raise TypeError(f"there is no setting {min(unknown)!r}")
    for row in fields(Settings):
        name, value = row.name, said.get(row.name)
        environment = _text(name, os.environ.get(variable(name), ""))
        if value is not None:
            text = _text(name, value)
            other = f"{variable(name)}={environment}" if environment not in ("", text) else None
            yield Choice(name, text, called(name), other)
        elif environment:
            yield Choice(name, environment, variable(name))
        else:
            yield Choice(name, None, "default")


class _Gone(NamedTuple):
    """A name that was a setting once."""

    name: str
    now: str
    """The setting in its place."""
    cure: str

    @property
    def flags(self) -> tuple[str, ...]:
        return flag(self.name), flag(f"no_{self.name}")

    def refuse(self, _: str) -> NoReturn:
        now = "leave it out" if self.name == "exact" else f"write {flag(self.now)}"
        raise argparse.ArgumentTypeError(f"it is no flag any more, {now}: {self.cure}")


_GONE: Final = (
    _Gone(
        "exact",
        "wire_dtype",
        "floats travel as they are unless wire_dtype (FANIN_WIRE_DTYPE) says otherwise: leave it "
        "out",
    ),
    _Gone(
        "own_services",
        "plan",
        "plan=switch (FANIN_PLAN=switch) is what own_services=0 was, own_services=1 is the "
        "default, and --own-services of fanin bench is --plan own",
    ),
    _Gone("slots", "in_flight", "write in_flight (FANIN_IN_FLIGHT) instead"),
    _Gone("window", "in_flight", "write in_flight (FANIN_IN_FLIGHT) instead"),
)


def _gone() -> Iterator[tuple[str, str, str]]:
    """Yield the variables that were settings once: the name, the variable, and what is wrong."""
    for gone in _GONE:
        source = variable(gone.name)
        if text := os.environ.get(source, "").strip():
            yield gone.name, source, f"{source} is {text!r}: {gone.cure}"


def _parsed(choice: Choice) -> Any:
    (parse,) = (row.metadata["parse"] for row in fields(Settings) if row.name == choice.name)
    try:
        return parse(choice.text)
    except ValueError as error:
        raise ValueError(f"{choice.source} is {choice.text!r}: {error}") from None


def _protocol(choices: list[Choice]) -> Protocol:
    (choice,) = (choice for choice in choices if choice.name == "protocol")
    protocol: Protocol = Settings().protocol if choice.text is None else _parsed(choice)
    return protocol


def _held_to(protocol: Protocol | None, choice: Choice) -> Any:
    """Parse, and refuse what would be without effect. None: the protocol is not known."""
    value = _parsed(choice)
    rows = {row.name: row.metadata for row in fields(Settings)}
    only = {name: row["only"] for name, row in rows.items()}
    if protocol is None or not only[choice.name] or protocol in only[choice.name]:
        return value
    if value == getattr(Settings(), choice.name) or value in rows[choice.name]["of_others"]:
        return value
    others = rows[choice.name]["others"]
    if others is None:
        others = f"which has {', '.join(name for name in only if protocol in only[name])}"
    raise ValueError(
        f"{choice.source} is {choice.text!r}: it is a setting of {' and '.join(only[choice.name])},"
        f" and the protocol is {protocol}, {others}: leave it out"
    )


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    text = str(value).strip()
    # A number alone is bits a second; the one grammar of rates has a unit.
    return f"{text}bit" if name == "rate" and text.isdecimal() else text


def as_backend(explicit: str | None = None) -> Literal["gloo"] | None:
    """Return the backend of torch whose groups fanin makes in its place; None for no backend.

    Raises `ValueError` when the argument or FANIN_AS is a backend that fanin cannot stand in for.
    """
    text = os.environ.get(AS_VARIABLE, "").strip() or None if explicit is None else explicit
    if text is None:
        return None
    if text == "gloo":
        return "gloo"
    name = AS_VARIABLE if explicit is None else "--as"
    raise ValueError(
        f'{name} is {text!r}: only "gloo" is possible, as fanin does all that Gloo does; a program '
        'that asks for another backend can ask for "fanin" itself'
    )

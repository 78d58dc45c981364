"""`fanin netlab`: the subcommands."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from fanin import _signals

from fanin_lab import units
from fanin_lab.netlab import queues
from fanin_lab.netlab.kernel import (
    NetlabError,
    checked_name,
    inside,
    namespace_of,
    require_root,
    require_tools,
)
from fanin_lab.netlab.lab import (
    MTU_DEFAULT,
    SERVER_ADDRESS,
    SWITCH,
    SWITCH_ADDRESS,
    Netlab,
    address,
    down,
    members,
)
from fanin_lab.netlab.state import describe

EXAMPLES = """\
examples (as root):
  fanin netlab up --workers 4 --rate 1gbit --loss 0.1%
  fanin netlab exec sw -- fanin switch --listen 10.77.0.254:4800 &
  fanin netlab exec w0 -- fanin status --switch 10.77.0.254:4800
  fanin netlab status
  fanin netlab down
four machines, the last with a slower link, and a fast one that only sums:
  fanin netlab up --workers 4 --rate 1gbit --rate-of w3=500mbit --spares 1 --spare-rate 2.5gbit
  fanin netlab exec s0 -- fanin switch --listen 10.77.0.209:4800 &
workers with two links each, in 10.77.0.0/24 and 10.78.0.0/24:
  fanin netlab up --workers 4 --nics 2 --rate 1gbit --rate-of eth1=500mbit
  fanin netlab exec w0 -- env GLOO_SOCKET_IFNAME=eth0,eth1 torchrun ...
queues that act on what packets of DLCP say of themselves:
  fanin netlab up --workers 4 --spares 1 --rate 1gbit --queue 500KB --queues dlcp
two racks, for ATP:
  fanin netlab up --workers 4 --racks 2 --rate 1gbit
  fanin netlab exec server -- fanin switch --protocol atp --listen 10.77.0.254:4800 &
  fanin netlab exec sw0 -- fanin switch --listen 10.77.0.241:4800 \\
      --protocol atp --upstream 10.77.0.254:4800 &
"""


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="fanin netlab",
        description="A laboratory of network namespaces: workers w0, w1, .. (10.77.0.1, .2, ..), "
        f"each with a link to sw ({SWITCH_ADDRESS}), which is for the switch and has a link for "
        f"each of them. Spare machines s0, s1, .. ({address('s0')}, ..) have one link, as workers "
        "do, for switches on machines such as these. With several racks the workers are divided "
        f"among sw0, sw1, .. ({address('sw0')}, ..), each with a link to server "
        f"({SERVER_ADDRESS}), where the spare machines then are. Needs root.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--name", default="", help="one of several laboratories on this machine")
        return sub

    up = command("up", "Build the laboratory.")
    up.add_argument(
        "--replace",
        action="store_true",
        help="in place of the one that there is, which ends with all that runs in it",
    )
    up.add_argument("--workers", type=int, required=True, metavar="N")
    up.add_argument(
        "--racks", type=int, default=1, metavar="R", help="switches under a server (default: 1)"
    )
    add_link_arguments(up)
    add_machine_arguments(up)
    execute = command("exec", "Run a command in w0, w1, .., s0, .., sw or server.")
    execute.add_argument("member", metavar="MEMBER", help="w0, w1, .., s0, .., sw or server")
    execute.add_argument("argv", metavar="-- COMMAND ...", nargs=argparse.REMAINDER)
    command("down", "Remove the laboratory, whole or half-built, and end what runs in it.")
    status = command("status", "Show the laboratory's links.")
    status.add_argument("--json", action="store_true", help="for programs")
    return made


def add_link_arguments(parser: argparse._ActionsContainer) -> None:
    """Add what `fanin netlab up` and `fanin bench` say of links, from --rate to --mtu."""
    parser.add_argument(
        "--rate",
        type=units.rate_bps,
        metavar="R",
        help="of each link, both ways, as tc writes it: 500mbit, 1gbit (default: unshaped)",
    )
    parser.add_argument(
        "--queue",
        type=units.size_bytes,
        metavar="SIZE",
        help="what may wait at each port of a switch before a link with a rate; more is dropped: "
        "200KB (default: 50 ms of the rate). A machine's own interface queues 1,000 packets",
    )
    parser.add_argument(
        "--queues",
        choices=queues.KINDS,
        default=queues.FIFO,
        help="at each port of a switch before a link with a rate: one (default), or as DLCP asks "
        "for them, eight by DSCP, of which each drops what is not ECN-capable early; --queue is "
        "each one's, and links carry no trains, as with a loss",
    )
    parser.add_argument(
        "--burst",
        type=units.size_bytes,
        metavar="SIZE",
        help="what a link with a rate carries after a pause as fast as the machine: 128KB "
        "(default: 4 ms of the rate, at most 128KiB)",
    )
    parser.add_argument(
        "--ecn",
        type=units.size_bytes,
        metavar="SIZE",
        help="switches mark ECN-capable packets that would wait behind so much at a port with a "
        "rate, where each packet counts as a full one: 30KB; without segmentation offload, as "
        "with --loss (default: none marks)",
    )
    parser.add_argument(
        "--no-udp-offload",
        action="store_false",
        dest="udp_offload",
        help="interfaces that do not cut UDP's trains, as many clouds' do not: the kernel does, "
        "and packets arrive singly; TCP's trains stay whole",
    )
    parser.add_argument(
        "--loss",
        type=units.loss_fraction,
        metavar="P",
        help="of packets on each link in each direction: 0.1%% or 0.001; without segmentation "
        "offload, so that a packet is a packet, which costs CPU time: compare with a loss of 0 "
        "(default: none, and trains stay whole)",
    )
    parser.add_argument(
        "--loss-burst",
        type=units.positive_number,
        metavar="N",
        help="packets that a link loses in a row, and then none for as long as makes it --loss: 8 "
        "(default: each is lost or not by itself)",
    )
    parser.add_argument(
        "--mtu", type=int, metavar="M", help=f"of each link, bytes (default: {MTU_DEFAULT})"
    )


def add_machine_arguments(parser: argparse._ActionsContainer) -> None:
    """Add what machines there are beyond workers that are alike."""
    parser.add_argument(
        "--nics",
        type=units.positive_number,
        default=1,
        metavar="N",
        help="links of each worker, eth0, eth1, .., each with a subnet of its own: 10.77.0.0/24, "
        "10.78.0.0/24, .. (default: 1)",
    )
    parser.add_argument(
        "--spares",
        type=units.whole_number,
        default=0,
        metavar="K",
        help="machines more, s0, s1, .., each with one link (default: 0)",
    )
    parser.add_argument(
        "--spare-rate",
        type=units.rate_bps,
        metavar="R",
        help="of their links (default: that of --rate)",
    )
    parser.add_argument(
        "--rate-of",
        type=_rate_of,
        action="append",
        default=[],
        metavar="MACHINE=R",
        help="of one machine's link, as in w3=500mbit, or a rack's switch's, as in sw0=2gbit; of "
        "all workers' further links, as in eth1=500mbit, or of one, as in w3:eth1=500mbit; for "
        "each such once",
    )


def _rate_of(text: str) -> tuple[str, int]:
    member, found, rate = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no machine and rate; write w3=500mbit")
    return member, units.rate_bps(rate)


def main(argv: list[str]) -> int:
    """Run `fanin netlab ARGV` and return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        checked_name(args.name)
        match args.command:
            case "up":
                return _up(args)
            case "exec":
                return _exec(parser, args)
            case "down":
                gone = down(args.name)
                print(f"removed {' '.join(gone)}" if gone else "there was no laboratory")
            case "status":
                return _status(args)
    except NetlabError as error:
        print(f"fanin netlab: {error}", file=sys.stderr)
        return 1
    return 0


def _up(args: argparse.Namespace) -> int:
    lab = Netlab(
        args.workers,
        spares=args.spares,
        racks=args.racks,
        nics=args.nics,
        rate_bps=args.rate,
        spare_rate_bps=args.spare_rate,
        rates=dict(args.rate_of),
        queue_bytes=args.queue,
        queues=args.queues,
        burst_bytes=args.burst,
        ecn_bytes=args.ecn,
        udp_offload=args.udp_offload,
        loss=args.loss,
        loss_burst=args.loss_burst,
        mtu=args.mtu if args.mtu is not None else MTU_DEFAULT,
        name=args.name,
    )
    if not args.replace and (others := members(args.name)):
        raise NetlabError(
            f"there is a laboratory ({' '.join(others)}), perhaps somebody else's: --name NAME "
            "makes another one beside it, and --replace ends it first"
        )
    with _signals.as_exit():
        lab.up()
    above = f"sw at {SWITCH_ADDRESS}"
    if lab.racks > 1:
        last = f"sw{lab.racks - 1}"
        above = f"sw0 at {address('sw0')} to {last} at {address(last)}, server at {SERVER_ADDRESS}"
    there = f"{_shown_machines('w', lab.workers, 'worker')}, {above}"
    if lab.spares:
        there += f", {_shown_machines('s', lab.spares, 'spare machine')}"
    links = units.shown_links(
        lab.rate_bps,
        lab.loss,
        lab.mtu,
        loss_burst=lab.loss_burst,
        spare_bps=args.spare_rate,
        rates=dict(args.rate_of),
        queue=lab.queue_bytes,
        burst=lab.burst_bytes,
        ecn=lab.ecn_bytes,
        udp_offload=lab.udp_offload,
        nics=lab.nics,
        queues=lab.queues,
    )
    print(f"{there}; {links}")
    return 0


def _shown_machines(kind: str, count: int, what: str) -> str:
    first, last = f"{kind}0", f"{kind}{count - 1}"
    if count == 1:
        return f"1 {what}, {first} at {address(first)}"
    return f"{count} {what}s, {first} at {address(first)} to {last} at {address(last)}"


def _exec(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    command = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not command:
        parser.error("exec: no command; say: fanin netlab exec w0 -- COMMAND ...")
    require_root()
    require_tools("ip")
    if args.member not in (there := members(args.name)):
        found = f"there are {' '.join(there)}" if there else "there is none; see: fanin netlab up"
        raise NetlabError(f"no {args.member} in the laboratory: {found}")
    sys.stdout.flush()
    execute = inside(namespace_of(args.name, args.member), command)
    os.execvp(execute[0], execute)


def _shown_link(link: Mapping[str, Any]) -> str:
    rates = [
        "unshaped" if bps is None else units.shown_rate(bps)
        for bps in (link["up_rate_bps"], link["down_rate_bps"])
    ]
    return (
        f"{link['address'] or 'no address':<12} "
        f"{'connected' if link['connected'] else 'not connected'}, "
        f"MTU {link['mtu_bytes']}, up {rates[0]}, down {rates[1]}, "
        f"loss {100 * (link['down_loss'] or 0):g} %"
    )


def _status(args: argparse.Namespace) -> int:
    state = describe(args.name)
    if args.json:
        print(json.dumps(state))
        return 0
    machines = [*state["workers"], *state["spares"]]
    if not machines and not state["bridges"]:
        print("no laboratory")
        return 0
    bridges = state["bridges"] or [{"name": SWITCH, "address": None}]
    for bridge in bridges:
        print(f"{bridge['name']:<4} {bridge['address'] or 'missing'}")
    for machine in machines:
        print(f"{machine['name']:<4} {_shown_link(machine)}, processes {len(machine['processes'])}")
        for link in machine["further"]:
            print(f"{link['interface']:>4} {_shown_link(link)}")
    print(f"packets lost on purpose: {state['packets_lost']}")
    print(f"packets marked: {state['packets_marked']}")
    return 0

"""Traffic of others: datagrams at a constant rate, and who throws them away.

``python -m fanin_lab.bench.background send ADDRESS RATE LENGTH`` and ``.. sink ADDRESS`` run until
they are ended.
"""

from __future__ import annotations

import signal
import socket
import sys
import time

PORT = 4899
HEADERS_BYTES = 28
"""IP's and UDP's."""
FRAME_BYTES = 14
_TICK_S = 0.001
_BEHIND_S = 0.01
"""Traffic that could not be sent for longer than that is not made up for in a burst."""


def send(address: str, rate_bps: int, datagram_bytes: int) -> None:
    """Send for ever; the rate is that of Ethernet's frames, as tc counts them."""
    packet_s = 8 * (datagram_bytes + FRAME_BYTES) / rate_bps
    payload = bytes(datagram_bytes - HEADERS_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((address, PORT))
        due = time.monotonic()
        while True:
            now = time.monotonic()
            due = max(due, now - _BEHIND_S)
            while due <= now:
                sender.send(payload)
                due += packet_s
            time.sleep(max(_TICK_S, due - time.monotonic()))


def sink(address: str) -> None:
    """Hold the port, so that nobody answers that there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind((address, PORT))
        print("ready", flush=True)
        signal.pause()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["send", address, rate_bps, datagram_bytes]:
            send(address, int(rate_bps), int(datagram_bytes))
        case ["sink", address]:
            sink(address)
        case _:
            sys.exit(__doc__)

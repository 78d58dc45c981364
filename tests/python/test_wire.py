"""The golden packets, read by docs/wire.md's table and nothing of the project's."""

import struct
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "crates/wire/golden/packets.txt"
PREAMBLE = struct.Struct("<HBBIHBB")
SLOT = struct.Struct("<HhIIHBBI")
GRADIENT = struct.Struct("<BBhQIIHBBI4I4BhH")
PLANNED = struct.Struct("<BBhQIIHBBIQQHHhHQQ")
ABORT = struct.Struct("<BxHH2xHBBIHBBI")
BLOCK = struct.Struct("<IIHBBHBB")
SIGNAL = struct.Struct("<IHBB")
TAG = struct.Struct("<Q")
KEY = bytes(range(16))
ECN = 4


def siphash(key: bytes, message: bytes, compression: int = 1, finalization: int = 3) -> int:
    """SipHash-c-d, by its paper."""
    mask = (1 << 64) - 1
    k0, k1 = struct.unpack("<QQ", key)
    v = [0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573]
    v = [v[0] ^ k0, v[1] ^ k1, v[2] ^ k0, v[3] ^ k1]

    def rotated(value: int, bits: int) -> int:
        return (value << bits | value >> (64 - bits)) & mask

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, by, c, d, with_ in ((0, 1, 13, 2, 3, 16), (2, 1, 17, 0, 3, 21)):
                v[a] = (v[a] + v[b]) & mask
                v[b] = rotated(v[b], by) ^ v[a]
                v[a] = rotated(v[a], 32)
                v[c] = (v[c] + v[d]) & mask
                v[d] = rotated(v[d], with_) ^ v[c]

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(compression)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(finalization)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_every_header_ends_with_its_tag() -> None:
    assert siphash(KEY, bytes(range(15)), 2, 4) == 0xA129CA6149BE45E5, "the paper's own example"
    for name, packet in packets().items():
        signal = len(packet) - TAG.size
        at = {4: 36, 5: 64, 8: signal, 10: 80, 11: 28}.get(PREAMBLE.unpack_from(packet)[2], 32)
        header = bytearray(packet[:at])
        if PREAMBLE.unpack_from(packet)[2] in (5, 10):
            header[13] &= ~ECN
        assert TAG.unpack_from(packet, at) == (siphash(KEY, bytes(header)),), name


def packets() -> dict[str, bytes]:
    lines = GOLDEN.read_text().splitlines()
    pairs = (line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: bytes.fromhex(text) for name, text in pairs}


def test_slot_packets_are_as_documented() -> None:
    golden = packets()
    kinds = {"update_256": (1, 3), "probe": (1, 3), "result_256": (2, 255), "restore_256": (3, 63)}
    for name, (kind, worker) in kinds.items():
        preamble = PREAMBLE.unpack_from(golden[name])
        assert preamble == (0xFA51, 6, kind, 0xDEADBEEF, 0x0102, worker, 1), name
        header = SLOT.unpack_from(golden[name], PREAMBLE.size)
        assert header == (0x0304, -5, 0x11223345, 0x0A0B0C0D, 7, 3, 2, 1_000_000), name
        assert len(golden[name]) == PREAMBLE.size + SLOT.size + TAG.size == 40


def test_bfloat16_packets_are_as_documented() -> None:
    golden = packets()
    kinds = {"update": (1, 3), "probe": (1, 3), "result": (2, 255), "restore": (3, 63)}
    for kind, (number, worker) in kinds.items():
        packet = golden[f"{kind}_bfloat16" + ("" if kind == "probe" else "_512")]
        assert PREAMBLE.unpack_from(packet)[2:] == (number, 0xDEADBEEF, 0x0102, worker, 1), kind
        header = SLOT.unpack_from(packet, PREAMBLE.size)
        assert header == (0x0304, -5, 0x11223345, 0x0A0B0C0D, 7, 0x80 | 3, 2, 1_000_000), kind
        assert packet[40:] == (b"" if kind == "probe" else struct.pack("<hH", -7, 0)), kind


@pytest.mark.parametrize(("name", "bits"), [("int8_1280", 0xC0), ("int4_2560", 0x20)])
def test_packets_of_int8_and_int4_are_as_documented(name: str, bits: int) -> None:
    golden = packets()
    kinds = {"update": (1, 3), "result": (2, 255), "restore": (3, 63)}
    for kind, (number, worker) in kinds.items():
        packet = golden[f"{kind}_{name}"]
        assert PREAMBLE.unpack_from(packet)[2:] == (number, 0xDEADBEEF, 0x0102, worker, 1), kind
        header = SLOT.unpack_from(packet, PREAMBLE.size)
        assert header == (0x0304, -5, 0x11223345, 0x0A0B0C0D, 7, bits | 3, 2, 1_000_000), kind
        assert len(packet) == PREAMBLE.size + SLOT.size + TAG.size


def test_packets_of_elements_as_they_are_are_as_documented() -> None:
    golden = packets()
    rows = {
        "update_float64_128": (1, 3, 5),
        "result_float64_128": (2, 255, 5),
        "restore_float64_128": (3, 63, 5),
        "update_uint8_1024": (1, 3, 7),
    }
    for name, (kind, worker, dtype) in rows.items():
        packet = golden[name]
        assert PREAMBLE.unpack_from(packet)[2:] == (kind, 0xDEADBEEF, 0x0102, worker, 1), name
        header = SLOT.unpack_from(packet, PREAMBLE.size)
        assert header == (0x0304, -5, 0x11223345, 0x0A0B0C0D, 7, 0x40 | dtype, 2, 1_000_000), name
        assert len(packet) == PREAMBLE.size + SLOT.size + TAG.size


def test_packets_with_a_root_are_as_documented() -> None:
    golden = packets()
    rows = {
        "update_reduce_256": (1, 3, 3, 64 + 5),
        "result_reduce_others": (2, 255, 3, 128 + 5),
        "update_broadcast_1024": (1, 63, 0x40 | 7, 192 + 63),
        "update_broadcast_others": (1, 3, 0x40 | 7, 192 + 63),
    }
    for name, (kind, worker, dtype, op) in rows.items():
        packet = golden[name]
        assert PREAMBLE.unpack_from(packet)[2:] == (kind, 0xDEADBEEF, 0x0102, worker, 1), name
        header = SLOT.unpack_from(packet, PREAMBLE.size)
        assert header == (0x0304, -5, 0x11223345, 0x0A0B0C0D, 7, dtype, op, 1_000_000), name


def test_gradient_packets_are_as_documented() -> None:
    golden = packets()
    up = (1 << 4, 1 << 2, 0, 0, 5, 3, 0, 0)
    whole_rack = (0b11111, 1 << 2, 0, 0, 5, 3, 0, 0)
    partial = (0b10011, 1 << 2, 0, 0, 5, 3, 0, 0)
    down = (0x123456, 0, 0, 0, 0, 0, 0, 0)
    static = -32768
    # level, flags, next exponent, aggregator, directions, exponent
    rows = {
        "fragment_64": (0, 0, -5, 0xABCDEF, up, 3),
        "fragment_half_64": (0, 128, -5, 0xABCDEF, up, 3),
        "sum_64": (2, 1 | 2 | 4, -5, 0xABCDEF, whole_rack, static),
        "stalled_64": (1, 1 | 64, -5, 0xABCDEF, partial, static),
        "parameters_64": (0, 8, -5, 0xABCDEF, down, static),
        "parameters_half_64": (0, 8 | 128, -5, 0xABCDEF, down, static),
        "request": (0, 8 | 16, static, 0xABCDEF, (0,) * 8, static),
        "originals_64": (0, 1 | 16, -5, 0xABCDEF, up, static),
        "restored_64": (0, 1 | 32, -5, 0x123456, up, static),
    }
    for name, (level, flags, next_exponent, aggregator, directions, exponent) in rows.items():
        assert PREAMBLE.unpack_from(golden[name]) == (0xFA51, 6, 5, 0xDEADBEEF, 0x0102, 255, 0), (
            name
        )
        collective = (7, 3, 2, 1_000_000)
        assert GRADIENT.unpack_from(golden[name], PREAMBLE.size) == (
            *(level, flags, next_exponent, 0x123456789, aggregator, 0x0A0B0C0D),
            *(*collective, *directions, exponent, 0),
        ), name
        assert len(golden[name]) == PREAMBLE.size + GRADIENT.size + TAG.size == 72


def test_planned_packets_are_as_documented() -> None:
    golden = packets()
    own, three = 1 << (100 - 64), 0b1011
    static = -32768
    everybody = ((1 << 64) - 1, (1 << 64) - 1)
    # passed, flags, ranks below 64, participants; rank 100 is in each
    rows = {
        "planned_64": (0, 0, 0, everybody),
        "planned_sum_64": (1, 0, three, everybody),
        "planned_sum_of_some_64": (1, 0, three, (0b1111, own)),
        "planned_shown_64": (1, 1 | 64, three, everybody),
    }
    for name, (passed, flags, low, participants) in rows.items():
        assert PLANNED.unpack_from(golden[name], PREAMBLE.size) == (
            *(passed, flags, -5, 0x123456789, 0xABCDEF, 0x0A0B0C0D, 7, 3, 2, 1_000_000),
            *(low, own, 0x0102, 0x0304, 3, 0, *participants),
        ), name
    for name, flags, exponent in (
        ("planned_parameters_64", 8, static),
        ("planned_request", 8 | 16, 3),
    ):
        assert PLANNED.unpack_from(golden[name], PREAMBLE.size) == (
            *(1, flags, -5, 0x123456789, 0xABCDEF, 0x0A0B0C0D, 7, 3, 2, 1_000_000),
            *(0, 0, 0, 0x0304, exponent, 0, *everybody),
        ), name
    for name in (name for name in golden if name.startswith("planned_")):
        assert PREAMBLE.unpack_from(golden[name]) == (0xFA51, 6, 10, 0xDEADBEEF, 0x0102, 255, 0), (
            name
        )
        assert len(golden[name]) == PREAMBLE.size + PLANNED.size + TAG.size == 88


def test_abort_packets_are_as_documented() -> None:
    golden = packets()
    none = (0, 0, 0, 0, 0, 0, 0, 0)
    reasons = {
        "abort_expelled": (1, 9, 0, *none),
        "abort_mismatch": (2, 0, 5, 7, 3, 2, 100, 7, 1, 2, 200),
        "abort_mismatch_of_wire_dtypes": (2, 0, 5, 7, 3, 2, 100, 7, 0x83, 2, 100),
        "abort_mismatch_of_ranks": (2, 63, 4095, 7, 3, 2, 100, 7, 1, 2, 200),
        "abort_switch_stopped": (3, 0, 0, *none),
    }
    for name, fields in reasons.items():
        assert PREAMBLE.unpack_from(golden[name])[2] == 4
        assert ABORT.unpack_from(golden[name], PREAMBLE.size) == fields, name
        assert len(golden[name]) == PREAMBLE.size + ABORT.size + TAG.size

    bounds = golden["abort_loss_bounds"]
    assert struct.unpack_from("<BxHH2xIxxxxI", bounds, PREAMBLE.size) == (4, 0, 5, 10_000, 50_000)
    participants = golden["abort_participants"]
    assert struct.unpack_from("<BxHH18x", participants, PREAMBLE.size) == (5, 0, 127)


def test_dlcp_packets_are_as_documented() -> None:
    golden = packets()
    blocks = {
        "block_push": (0x01020304, 0x0A0B, 0, 3, 2, 1, 0, 0),
        "block_pull": (0x01020304, 0x0A0B, 1, 0x80 | 7, 0, 4, 0, 0),
        "block_unsummed": (0x01020304, 0x0A0B, 0, 0x80 | 7, 0, 0, 0, 0),
        "block_last": (0x01020304, 0x0A0B, 0, 0x80 | 7, 0, 0, 1, 0),
        "block_restored": (0x01020304, 0x0A0B, 0, 0x80 | 7, 0, 3, 0, 1),
    }
    for name, fields in blocks.items():
        assert PREAMBLE.unpack_from(golden[name])[2:] == (11, 0xDEADBEEF, 0x0102, 3, 1), name
        assert BLOCK.unpack_from(golden[name], PREAMBLE.size) == fields, name
        assert len(golden[name]) == PREAMBLE.size + BLOCK.size + TAG.size == 36
    start = struct.pack("<HBBI", 7, 0x40 | 1, 2, 1_000_000)
    signals = {
        "signal_start": (0, 1, start + struct.pack("<IIBBxx", 900_000, 10_000, 3, 1)),
        "signal_start_without_blocks": (0, 1, start + struct.pack("<IIBBxx", 900_000, 0, 3, 0)),
        "signal_stop": (5, 2, b""),
        "signal_confirm": (0, 3, b""),
        "signal_report": (0, 4, struct.pack("<III", 9, 100, 200)),
        "signal_request": (5, 5, bytes([1, 0, 0, 0, 0x81, 0, 0x10])),
        "signal_finish": (5, 6, b""),
    }
    for name, (number, code, body) in signals.items():
        assert PREAMBLE.unpack_from(golden[name])[2:] == (8, 0xDEADBEEF, 0x0102, 3, 1), name
        header = SIGNAL.unpack_from(golden[name], PREAMBLE.size)
        assert header == (0x01020304, number, code, 0), name
        assert golden[name][PREAMBLE.size + SIGNAL.size : -TAG.size] == body, name

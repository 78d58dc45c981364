"""Floats that travel as bfloat16: how far off the sums are, and who decides that they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import fanin
import fanin.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import Launch
from fanin._settings import Settings
from ranks import Failure, Me
from test_all_reduce import FLOATS
from wire_dtypes import held_to

# Elements of a chunk, by the path's MTU.
CHUNK_MIN = 512
CHUNK_MAX = 4096
# The short ones travel as they are (tests/python/test_native.py).
LENGTHS = [1, 512, 4097, 8192, 8193, 100_003]
# Unit roundoffs: of a contribution; of a sum, which is rounded to float32 first; of what a worker
# makes of it, divided in float32 and rounded to its own dtype.
CONTRIBUTION = 2.0**-8
SUM = 2.0**-8 + 2.0**-23


def error_bound(parts: list[torch.Tensor], divisor: int) -> torch.Tensor:
    """docs/protocols/switchml.md, "Floats as bfloat16", in float64."""
    n = len(parts)
    exact = torch.stack(parts).double()
    log2_n = (n - 1).bit_length()
    # 2^m is at most twice the largest magnitude, and 2^-k = 2^(m + ceil(log2 n) - 30).
    unit = 2 * exact.abs().max() * 2.0 ** (log2_n - 30)
    contributions = CONTRIBUTION * exact.abs().sum(0) + n * unit / 2
    off = contributions + SUM * (exact.sum(0).abs() + contributions)
    own = 2.0 ** -FLOATS[parts[0].dtype] + 2.0**-24
    size = exact.sum(0).abs() + off
    smallest = 2.0**-25 if parts[0].dtype == torch.float16 else 0.0
    return (off + own * size) / divisor + smallest


@pytest.mark.parametrize("average", [False, True], ids=["sum", "avg"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_every_dtype_is_within_the_bound_and_the_same_on_all_ranks(
    launch: Launch, dtype: torch.dtype, average: bool
) -> None:
    for length, exact, off in held_to(error_bound, launch, "bfloat16", LENGTHS, dtype, average):
        if length > 1000 and dtype == torch.float32:
            assert (off > 2.0**-10 * exact.abs()).any(), "it did not travel as bfloat16"


def special(me: Me) -> list[float]:
    with fanin.connect(
        job="wire-special", rank=me.rank, world_size=me.world_size, wire_dtype="bfloat16"
    ) as group:
        array = np.ones(2 * CHUNK_MAX, np.float32)
        if me.rank == 0:
            array[:4] = np.nan, np.inf, -np.inf, np.inf
        if me.rank == 1:
            array[3] = -np.inf
        group.all_reduce(array)
        assert not np.isfinite(array[:CHUNK_MIN]).any(), "no silent garbage in a poisoned block"
        assert (array[CHUNK_MAX:] == 2).all()
        largest = np.full(2 * CHUNK_MAX, np.finfo(np.float32).max, np.float32)
        group.all_reduce(largest, "avg")
        assert np.isinf(largest).all(), "the sum is out of range, as stated"
        difference = np.full(2 * CHUNK_MAX, (-1) ** me.rank * np.finfo(np.float32).max, np.float32)
        assert (group.all_reduce(difference) == 0).all()
        return [float(x) for x in array[:4]]


def test_nan_and_infinity_reach_every_rank(launch: Launch) -> None:
    for first in launch(special, 2).results():
        assert np.isnan(first[0])
        assert first[1:3] == [np.inf, -np.inf]
        assert np.isnan(first[3])


def on_switch(switch: str, job: str) -> str:
    command = [sys.executable, "-m", "fanin", "status", "--switch", switch, "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    (found,) = (entry["wire_dtype"] for entry in report["jobs"] if job in entry["job"])
    return str(found)


def test_an_argument_goes_before_the_environment_and_that_before_the_default(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(job: str, **arguments: Any) -> str:
        with fanin.connect(switch, job=job, rank=0, world_size=1, **arguments):
            return on_switch(switch, job)

    monkeypatch.delenv("FANIN_WIRE_DTYPE", raising=False)
    assert connected("wire-default") == "native"
    assert connected("wire-argument", wire_dtype="bfloat16") == "bfloat16"
    monkeypatch.setenv("FANIN_WIRE_DTYPE", "bfloat16")
    assert connected("wire-environment") == "bfloat16"
    assert connected("wire-before-environment", wire_dtype="native") == "native"
    assert fanin.torch.Options().settings.travels_as == "bfloat16"
    assert fanin.torch.Options(wire_dtype="native").settings.travels_as == "native"
    monkeypatch.setenv("FANIN_WIRE_DTYPE", "")
    assert fanin.torch.Options().settings.travels_as == "native"


def test_what_is_no_wire_dtype_is_refused_with_the_cure(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = '"native" or "shared_exponent" or "bfloat16" or "int8" or "int4"'
    with pytest.raises(ValueError, match=rf"^wire_dtype is .*'fp8'.*{choices}$"):
        fanin.connect(switch, job="wire-bad", rank=0, world_size=1, wire_dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^wire_dtype is ''"):
        fanin.torch.Options(wire_dtype="")  # type: ignore[arg-type]
    wrong = Settings(wire_dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one of shared_exponent, bfloat16, int8, int4, native"):
        fanin._fanin.Client([(switch, 1.0, None, None)], "wire-bad", 0, 1, wrong)
    monkeypatch.setenv("FANIN_WIRE_DTYPE", "float16")
    with pytest.raises(ValueError, match=r"^FANIN_WIRE_DTYPE is 'float16'"):
        fanin.connect(switch, job="wire-bad", rank=0, world_size=1)
    monkeypatch.setenv("FANIN_WIRE_DTYPE", "int32")
    with pytest.raises(ValueError, match=r'^FANIN_WIRE_DTYPE is .* called "shared_exponent" now'):
        fanin.connect(switch, job="wire-bad", rank=0, world_size=1)
    for once in ("exact", "float32"):
        monkeypatch.setenv("FANIN_WIRE_DTYPE", once)
        with pytest.raises(ValueError, match=r'^FANIN_WIRE_DTYPE is .* called "native"'):
            fanin.connect(switch, job="wire-bad", rank=0, world_size=1)


def groups(me: Me) -> dict[str, str]:
    """The wire dtype of each group's job, as the switch has it."""
    os.environ["FANIN_WIRE_DTYPE"] = "bfloat16"
    me.init()
    native: Any = dist.new_group(pg_options=fanin.torch.Options(wire_dtype="native"))
    split: Any = dist.split_group(native, [[0, 1]])
    explicit: Any = dist.split_group(
        native, [[0, 1]], pg_options=fanin.torch.Options(wire_dtype="bfloat16")
    )
    found = {}
    for name, group in (
        ("default", dist.group.WORLD),
        ("new", native),
        ("split", split),
        ("explicit", explicit),
    ):
        backend: Any = group._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        found[name] = on_switch(me.switch, backend._channel._client.job)
    dist.barrier()
    return found


def test_each_group_has_its_own_options(launch: Launch) -> None:
    expected = {
        "default": "bfloat16",
        "new": "native",
        "split": "native",
        "explicit": "bfloat16",
    }
    assert launch(groups, 2).results() == [expected, expected]


def differs(me: Me, how: str) -> None:
    dtype: Any = ["shared_exponent", None][me.rank]
    if how == "environment":
        os.environ["FANIN_WIRE_DTYPE"] = dtype or ""
        me.init()
    elif how == "options":
        me.init(pg_options=fanin.torch.Options(wire_dtype=dtype))
    else:
        me.init("gloo")
        fanin.torch.HookState(wire_dtype=dtype)


@pytest.mark.parametrize("how", ["environment", "options", "hook"])
def test_ranks_that_disagree_all_get_the_same_clear_error(launch: Launch, how: str) -> None:
    ranks = launch(differs, 2, how)
    outcomes = [ranks.outcome(rank) for rank in range(2)]
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert outcome.kind == "SettingMismatch", outcome.text
    messages = {outcome.message for outcome in outcomes}
    assert len(messages) == 1
    (message,) = messages
    assert "rank 0" in message
    assert "rank 1" in message
    assert "FANIN_WIRE_DTYPE" in message

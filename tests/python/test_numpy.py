"""`fanin.connect` and `Group.all_reduce` on NumPy arrays."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import Any

import fanin
import numpy as np
import pytest
from conftest import Launch
from ranks import Me

JOB = "numpy"


def group(me: Me, job: str) -> fanin.Group:
    return fanin.connect(job=job, rank=me.rank, world_size=me.world_size, timeout=30)


def sums(me: Me) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with group(me, "numpy-sums") as ours:
        integers = np.arange(100_000, dtype=np.int32).reshape(100, 1000) - 40_000 * me.rank
        assert ours.all_reduce(integers) is integers
        out["int32"] = integers
        out["int32 avg"] = ours.all_reduce(np.array([-7, 7, me.rank], dtype=np.int32), "avg")
        out["float32"] = ours.all_reduce(np.full(1000, 1.5 + me.rank, dtype=np.float32))
        out["float16"] = ours.all_reduce(np.full(7, 0.25, dtype=np.float16), op="avg")
        strided = np.ones((6, 8), dtype=np.float32)
        view = strided[::2, 1::3]
        assert ours.all_reduce(view) is view
        out["strided"] = strided
        fortran = np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))
        out["fortran"] = ours.all_reduce(fortran)
        out["scalar"] = ours.all_reduce(np.array(3, dtype=np.int32))
        out["empty"] = ours.all_reduce(np.empty((0, 3), dtype=np.float32))
        out["statistics"] = ours.statistics()
    return out


def test_sums_and_averages_of_arrays_of_every_kind(launch: Launch) -> None:
    for got in launch(sums, 3).results():
        expected = 3 * np.arange(100_000, dtype=np.int32).reshape(100, 1000) - 120_000
        np.testing.assert_array_equal(got["int32"], expected)
        np.testing.assert_array_equal(got["int32 avg"], [-7, 7, 1])
        np.testing.assert_allclose(got["float32"], 7.5, rtol=1e-6)
        np.testing.assert_allclose(got["float16"], 0.25, rtol=1e-3)
        expected_strided = np.ones((6, 8), dtype=np.float32)
        expected_strided[::2, 1::3] = 3
        np.testing.assert_allclose(got["strided"], expected_strided, rtol=1e-6)
        np.testing.assert_array_equal(got["fortran"], [[0, 3, 6], [9, 12, 15]])
        assert got["scalar"] == 9
        assert got["empty"].shape == (0, 3)
        assert all(isinstance(value, int) for value in got["statistics"].values())


def several(me: Me) -> list[int]:
    with group(me, "numpy-several") as ours:
        arrays = [np.full(5000 + i, i, dtype=np.int32) for i in range(20)]
        handles = [ours.all_reduce_async(array) for array in arrays]
        for handle in reversed(handles):
            handle.wait()
            assert handle.done()
    return [int(array.min()) for array in arrays] + [int(array.max()) for array in arrays]


def test_several_outstanding_all_reduces_may_be_awaited_in_any_order(launch: Launch) -> None:
    expected = [2 * i for i in range(20)] * 2
    assert launch(several, 2).results() == [expected, expected]


def test_a_handle_keeps_its_group(launch: Launch) -> None:
    assert launch(orphaned, 2).results() == [[2, 2, 2]] * 2


def orphaned(me: Me) -> Any:
    handle = group(me, "numpy-orphaned").all_reduce_async(np.ones(3, dtype=np.int32))
    gc.collect()
    return handle.wait().tolist()


def refused(me: Me) -> list[str]:
    messages = []
    with group(me, "numpy-refused") as ours:
        for array, op, kind in (
            (np.array(["a"]), "sum", TypeError),
            (np.ones(3, dtype=">f4"), "sum", TypeError),
            (np.ones(3, dtype=np.float32), "mean", ValueError),
        ):
            with pytest.raises(kind) as caught:
                ours.all_reduce(array, op)  # type: ignore[arg-type]
            messages.append(str(caught.value))
        # None of them spoiled the group.
        assert ours.all_reduce(np.ones(3, dtype=np.int32)).tolist() == [2, 2, 2]
        ours.close()
        with pytest.raises(fanin.errors.Closed):
            ours.all_reduce(np.ones(3, dtype=np.float32))
    return messages


def test_what_cannot_be_summed_is_refused_with_a_reason(launch: Launch) -> None:
    for messages in launch(refused, 2).results():
        assert "<U1" in messages[0]
        assert "byte order" in messages[1]
        assert "'mean'" in messages[2]


def test_a_missing_switch_address_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FANIN_SWITCH", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(fanin.errors.SwitchUnreachable, match=r"fanin switch.*FANIN_SWITCH"):
        fanin.connect(job="nowhere", rank=0, world_size=2)


def test_the_environment_can_turn_congestion_control_off(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def client(*said: Any, **_: Any) -> None:
        told.append(said[4].congestion_control)

    monkeypatch.setattr("fanin._join._fanin.Client", client)
    monkeypatch.setenv("FANIN_PROTOCOL", "atp")
    for text in ("", "0", "1"):
        monkeypatch.setenv("FANIN_CONGESTION_CONTROL", text)
        fanin.connect("nobody:1", job="windows", rank=0, world_size=1)
    assert told == [True, False, True]
    monkeypatch.setenv("FANIN_CONGESTION_CONTROL", "off")
    with pytest.raises(ValueError, match="FANIN_CONGESTION_CONTROL is 'off'"):
        fanin.connect("nobody:1", job="windows", rank=0, world_size=1)


def test_the_pool_size_can_be_chosen(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slots_of(job: str) -> int:
        command = [sys.executable, "-m", "fanin", "status", "--switch", switch, "--json"]
        report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        (slots,) = (entry["in_flight"] for entry in report["jobs"] if entry["job"] == job)
        assert isinstance(slots, int)
        return slots

    with fanin.connect(switch, job="pool-argument", rank=0, world_size=1, in_flight=17) as group:
        group.all_reduce(np.ones(100_000, np.float32))
        assert slots_of("pool-argument") == 17
    monkeypatch.setenv("FANIN_IN_FLIGHT", "19")
    with fanin.connect(switch, job="pool-environment", rank=0, world_size=1):
        assert slots_of("pool-environment") == 19
    monkeypatch.setenv("FANIN_IN_FLIGHT", "many")
    with pytest.raises(ValueError, match="FANIN_IN_FLIGHT is 'many'"):
        fanin.connect(switch, job="pool-nonsense", rank=0, world_size=1)

"""Programs of JAX that know nothing of fanin, with its collectives (`python -m fanin.jax.mpi`).

The programs are functions here, and import nothing of fanin. A process of a test runs this file.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Gloo in jaxlib fails when a process is so late (jax-ml/jax#40831), in seconds.
LATE = 31.0
DEADLINE = 240.0


def started(rank: int, world_size: int, meet: str, devices: int = 1) -> Any:
    import jax

    config: Any = jax.config
    config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize(meet, world_size, rank)
    assert jax.device_count("cpu") == world_size * devices
    return jax


def on_all(jax: Any, work: Any, mine: Any, shape: tuple[int, ...] = (-1,)) -> Any:
    """Run it on all processes' arrays, of which each has one, and return this process's results."""
    names = ("x", "y")[: len(shape)]
    # Another order than the processes have.
    devices = np.array(jax.devices())[::-1].reshape(shape)
    mesh, spec = jax.sharding.Mesh(devices, names), jax.sharding.PartitionSpec(names)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    given = jax.make_array_from_process_local_data(sharding, mine)
    run = jax.jit(
        jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
    )
    return jax.tree.map(lambda each: np.asarray(each.addressable_shards[0].data), run(given))


def collectives(rank: int, world_size: int, meet: str) -> None:
    jax = started(rank, world_size, meet)
    lax, n = jax.lax, world_size
    place = n - 1 - rank
    ring = [(index, (index + 1) % n) for index in range(n)]

    def work(x: Any) -> Any:
        return {
            "psum": lax.psum(x, "x"),
            "pmax": lax.pmax(x, "x"),
            "psum_scatter": lax.psum_scatter(x, "x", tiled=True),
            "all_gather": lax.all_gather(x, "x", tiled=True),
            "all_to_all": lax.all_to_all(x, "x", 0, 0, tiled=True),
            "ppermute": lax.ppermute(x, "x", ring),
        }

    for dtype, rows in (("float32", 30_000), ("int32", 3), ("bfloat16", 500)):
        every = [np.arange(rows * n) % 7 + 10.0 * each for each in range(n)]
        total, part = np.sum(every, axis=0), slice(rows * place, rows * (place + 1))
        made = on_all(jax, work, every[place].astype(jax.numpy.dtype(dtype)))
        expected = {
            "psum": total,
            "pmax": every[-1],
            "psum_scatter": total[part],
            "all_gather": np.concatenate(every),
            "all_to_all": np.concatenate([each[part] for each in every]),
            "ppermute": every[place - 1],
        }
        for name, values in expected.items():
            assert made[name].dtype == dtype, name
            np.testing.assert_array_equal(made[name].astype(float), values, name)
    # XLA has no datatype of MPI for it. docs/jax.md says so.
    with pytest.raises(jax.errors.JaxRuntimeError, match="f16"):
        on_all(jax, lambda x: lax.psum(x, "x"), np.ones(n, np.float16))


def groups(rank: int, world_size: int, meet: str) -> None:
    """A mesh of two axes: each has communicators of two processes."""
    jax = started(rank, world_size, meet)

    def work(x: Any) -> Any:
        return [jax.lax.psum(x, "x"), jax.lax.psum(x, "y"), jax.lax.psum(x, ("x", "y"))]

    place = world_size - 1 - rank
    for _ in range(5):
        of_x, of_y, of_all = on_all(jax, work, np.full(5, 10.0**place, np.float32), (2, 2))
        assert of_x.tolist() == [10.0**place + 10.0 ** (place ^ 2)] * 5
        assert of_y.tolist() == [10.0**place + 10.0 ** (place ^ 1)] * 5
        assert of_all.tolist() == [1111.0] * 5


def large(rank: int, world_size: int, meet: str) -> None:
    """jax-ml/jax#40830: Gloo's psum_scatter has wrong sums, the more often the larger it is."""
    jax = started(rank, world_size, meet)
    rows, place = 2_000_000, world_size - 1 - rank
    every = [
        np.random.default_rng(each).integers(0, 99, rows * world_size).astype(np.float32)
        for each in range(world_size)
    ]
    expected = np.sum(every, axis=0)[rows * place : rows * (place + 1)]
    for _ in range(5):
        made = on_all(jax, lambda x: jax.lax.psum_scatter(x, "x", tiled=True), every[place])
        np.testing.assert_array_equal(made, expected)


def late(rank: int, world_size: int, meet: str) -> None:
    jax = started(rank, world_size, meet)
    for seconds in (0.0, LATE):
        time.sleep(seconds if rank == 1 else 0.0)
        made = on_all(
            jax, lambda x: jax.lax.psum_scatter(x, "x", tiled=True), np.ones(world_size, np.float32)
        )
        assert made.tolist() == [world_size]


def lost(rank: int, world_size: int, meet: str, how: str) -> None:
    jax = started(rank, world_size, meet)
    ring = [(index, (index + 1) % world_size) for index in range(world_size)]
    work = {
        "psum": lambda x: jax.lax.psum(x, "x"),
        "ppermute": lambda x: jax.lax.ppermute(x, "x", ring),
        "all_to_all": lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
    }[how]
    on_all(jax, work, np.ones(world_size, np.float32))
    if rank == 1:
        os._exit(9)
    try:
        on_all(jax, work, np.ones(world_size, np.float32))
    except Exception as error:
        os.write(1, f"{error}\n".encode())
        os._exit(3)  # jax.distributed would wait for the lost process


def several_devices(rank: int, world_size: int, meet: str) -> None:
    jax = started(rank, world_size, meet, devices=2)
    mesh = jax.make_mesh((world_size, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec(("x", "y"))
    given = jax.make_array_from_process_local_data(
        jax.sharding.NamedSharding(mesh, spec), np.ones(4, np.float32)
    )
    run = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with pytest.raises(Exception, match="this process has 2 CPU devices"):
        jax.block_until_ready(jax.jit(run)(given))


@contextmanager
def processes(
    name: str, world_size: int, *said: str, switch: str | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a program here in several processes: as on several machines if a switch is named."""
    from conftest import free_address

    meet = free_address()
    begun = []
    try:
        for rank in range(world_size):
            environment = {"JAX_PLATFORMS": "cpu", "FANIN_SWITCH": "", "RANK": "", "WORLD_SIZE": ""}
            if switch is not None:
                environment |= {"FANIN_SWITCH": switch, "FANIN_MACHINE": f"m{rank}"}
            program = [__file__, name, str(rank), str(world_size), meet, *said]
            begun.append(
                subprocess.Popen(
                    [sys.executable, "-m", "fanin.jax.mpi", *program],
                    env=os.environ | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield begun
    finally:
        for process in begun:
            process.kill()
            process.communicate()


def run(name: str, world_size: int, switch: str | None = None) -> None:
    with processes(name, world_size, switch=switch) as begun:
        for process in begun:
            text, _ = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0, text


def test_collectives_of_an_unmodified_program_are_right() -> None:
    run("collectives", 4)


@pytest.mark.parametrize("named", [False, True], ids=["services", "switch"])
def test_machines_sum_by_services_or_by_a_switch(switch: str, named: bool) -> None:
    run("collectives", 2, switch if named else "")


def test_each_axis_of_a_mesh_has_groups_of_its_own() -> None:
    run("groups", 4)


def test_a_large_psum_scatter_is_right() -> None:
    run("large", 2)


@pytest.mark.long
def test_a_process_may_be_later_than_gloo_waits() -> None:
    run("late", 2)


@pytest.mark.parametrize("how", ["psum", "ppermute", "all_to_all"])
def test_a_lost_process_is_an_error_of_the_others(how: str) -> None:
    with processes("lost", 2, how) as (survivor, _):
        text, _ = survivor.communicate(timeout=DEADLINE)
        assert survivor.returncode == 3, text
        # The mesh has the processes in another order.
        assert "MPI error: RankLost: rank 0 is lost" in text
        assert "rank 0 is process 1, rank 1 is process 0" in text


def test_several_devices_of_a_process_are_refused() -> None:
    run("several_devices", 2)


def test_the_library_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fanin.jax import mpi

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = mpi.library()
    assert [*made.parent.iterdir()] == [made]
    # Other machines may share the folder.
    assert f"-{platform.machine()}-" in made.name
    assert made.parent.stat().st_mode & 0o777 == 0o700
    before = made.stat()
    assert mpi.environment()["MPITRAMPOLINE_LIB"] == str(made)
    assert made.stat() == before


@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_library_that_others_can_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, which: str
) -> None:
    from fanin.jax import mpi

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = mpi.library()
    chosen = made if which == "file" else made.parent
    chosen.chmod(0o720)
    with pytest.raises(mpi.UnsafeLibrary, match=r"mode 720.*chmod go-w") as caught:
        mpi.library()
    assert caught.value.path == chosen
    chosen.chmod(0o700)
    assert mpi.library() == made
    monkeypatch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
    with pytest.raises(mpi.UnsafeLibrary, match=r"belongs to user.*chown"):
        mpi.library()


def test_a_machine_without_a_compiler_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fanin.jax import mpi

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="install a C compiler or name it by CC"):
        mpi.library()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(RuntimeError, match="false cannot compile"):
        mpi.library()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Bcast", "MPIABI_Bcast was called. fanin's MPI has the calls of XLA's collectives alone"),
        ("Allreduce", "MPI_Allreduce was called before MPI_Init_thread"),
    ],
    ids=["absent", "early"],
)
def test_a_call_that_cannot_be_done_ends_the_process_with_a_text(name: str, told: str) -> None:
    from fanin.jax import mpi

    text = f"import ctypes, sys; ctypes.CDLL(sys.argv[1]).MPIABI_{name}()"
    ended = subprocess.run(
        [sys.executable, "-c", text, str(mpi.library())], capture_output=True, text=True
    )
    assert ended.returncode < 0
    assert told in ended.stderr


if __name__ == "__main__":
    program, rank, world_size, *said = sys.argv[1:]
    globals()[program](int(rank), int(world_size), *said)

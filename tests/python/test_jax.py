"""fanin.jax: collectives in and outside of `jit`, their order, their gradients, and a training."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Launch, free_address
from fanin import _fanin, errors
from fanin._settings import PACKED, Packed
from programs import Program
from ranks import Me

ALONE = ""  # for `launch`: no switch is named
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_jax.py"
# Most of what a few steps take is XLA's compiling. This is a third of it, for slower programs.
COMPILES_SOON = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
WAYS = ("memory", "services")
MEAN: Any = "mean"


def joined(me: Me, way: str, meet: str, **said: Any) -> Any:
    """Join; jax is loaded by the ranks alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import fanin.jax

    if way == "services":
        said["machine"] = f"m{me.rank}"
    return fanin.jax.connect(
        rank=me.rank, world_size=me.world_size, rendezvous=meet, timeout=30, **said
    )


def trees(me: Me, way: str, meet: str) -> None:
    with joined(me, way, meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        n, rank = me.world_size, me.rank
        tree = {
            "float": jnp.arange(6.0).reshape(2, 3) + rank,
            "short": (jnp.full(4, rank, jnp.bfloat16), jnp.ones(2, jnp.float16)),
            "whole": jnp.int32(rank),
            "empty": jnp.zeros((0, 3)),
            "large": jnp.ones((n, 70_000)) * (rank + 1),
        }
        triangle = n * (n - 1) // 2
        for run in (lambda work: work, jax.jit):
            sums = run(lambda it: fj.all_reduce(it, group))(tree)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), sums) == jax.tree.map(
                lambda x: (x.shape, x.dtype), tree
            )
            np.testing.assert_array_equal(
                sums["float"], n * np.arange(6.0).reshape(2, 3) + triangle
            )
            assert sums["short"][0].tolist() == [triangle] * 4
            assert sums["whole"] == triangle
            assert np.unique(sums["large"]).tolist() == [triangle + n]
            most = run(lambda it: fj.all_reduce(it, group, "max"))(tree)
            assert most["whole"] == n - 1
            first = run(lambda it: fj.broadcast(it, group, n - 1))(tree)
            np.testing.assert_array_equal(first["float"][0], np.arange(3.0) + n - 1)
            every = run(lambda it: fj.all_gather(it, group))(tree)
            assert every["whole"].tolist() == list(range(n))
            assert every["float"].shape == (2 * n, 3)
            part = run(lambda it: fj.reduce_scatter(it, group, "avg"))(tree["large"])
            assert part.shape == (1, 70_000)
            assert np.unique(part).tolist() == [(n + 1) / 2]
            # What was given is as it was.
            assert tree["whole"] == rank
            assert np.unique(tree["large"]).tolist() == [rank + 1]
        assert fj.all_reduce({}, group) == {}


@pytest.mark.parametrize("way", WAYS)
def test_trees_are_summed_inside_and_outside_of_jit(launch: Launch, way: str) -> None:
    launch(trees, 3, way, free_address(), at=ALONE).results()


def in_order(me: Me, way: str, meet: str) -> None:
    """Nothing in these programs depends on each other, and all have one shape."""
    with joined(me, way, meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        def forty(x: Any) -> list[Any]:
            return [fj.all_reduce(x * number, group) for number in range(40)]

        def branches(x: Any) -> Any:
            def body(carry: Any, number: Any) -> tuple[Any, Any]:
                told = jax.lax.cond(
                    number % 2 == 0,
                    lambda: fj.all_reduce(x[0] * number, group),
                    lambda: fj.all_reduce(-x[0] * number, group, "max"),
                )
                return fj.all_reduce(carry, group, "avg") + 1, told

            return jax.lax.scan(body, x[0], jnp.arange(10.0))

        n = me.world_size
        total, mine = n * (n + 1) / 2, jnp.full(1000, me.rank + 1.0)
        both = jax.jit(lambda x: (forty(x), branches(x), forty(x + 1)))
        for _ in range(10):
            first, (carry, told), second = both(mine)
            assert [float(each[0]) for each in first] == [total * k for k in range(40)]
            assert [float(each[-1]) for each in second] == [(total + n) * k for k in range(40)]
            assert float(carry) == total / n + 10
            assert told.tolist() == [total * k if k % 2 == 0 else -k for k in range(10)]


@pytest.mark.parametrize("way", WAYS)
def test_calls_are_made_in_the_order_of_the_program(launch: Launch, way: str) -> None:
    launch(in_order, 3, way, free_address(), at=ALONE).results()


def gradients(me: Me, meet: str) -> None:
    with joined(me, "services", meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        n, rank = me.world_size, me.rank

        rows = jnp.linspace(-1.0, 1.0, n * 4).reshape(n, 4)

        weight = jnp.arange(n * 4.0)

        def mine(x: Any) -> Any:
            """This rank's loss."""
            y = fj.all_reduce(x, group) ** 2
            y += fj.all_reduce(jnp.sin(x), group, "avg") * (rank + 1)
            z = fj.all_gather(x**2, group) * weight + fj.all_gather(x, group)
            parts = fj.reduce_scatter(jnp.tile(x, n) * weight, group)
            root = fj.broadcast(x, group, 1)
            return y.sum() + (z * (rank + 2)).sum() + (parts**2).sum() + (root**3).sum()

        def total(rows: Any) -> Any:
            """The sum of all ranks' losses, in one process."""
            whole: Any = 0.0
            for rank in range(n):
                y = rows.sum(0) ** 2 + jnp.sin(rows).mean(0) * (rank + 1)
                z = (rows**2).reshape(-1) * weight + rows.reshape(-1)
                parts = (rows * weight.reshape(n, 4)[rank]).sum(0)
                root = rows[1]
                whole += y.sum() + (z * (rank + 2)).sum() + (parts**2).sum() + (root**3).sum()
            return whole

        expected = jax.grad(total)(rows)[rank]
        for run in (lambda work: work, jax.jit):
            np.testing.assert_allclose(run(jax.grad(mine))(rows[rank]), expected, 1e-5, 1e-5)
        # Integers beside floats have no gradient, and do no harm.
        pair = jax.grad(lambda x: fj.all_reduce({"x": x, "n": jnp.int32(3)}, group)["x"] * 2.0)
        assert pair(jnp.float32(1)) == 2 * n
        lines: Any = jax.vmap(lambda x: fj.reduce_scatter(fj.all_gather(x, group), group), 1, 1)
        np.testing.assert_allclose(lines(rows[rank].reshape(2, 2)), n * rows[rank].reshape(2, 2))
        # JAX's own error for a function without a derivative.
        with pytest.raises(NotImplementedError, match="Differentiation rule for 'fanin'"):
            jax.grad(lambda x: fj.all_reduce(x, group, "max"))(1.0)


def test_gradients_are_those_of_the_sum_of_all_losses(launch: Launch) -> None:
    launch(gradients, 3, free_address(), at=ALONE).results()


def averaged(me: Me, meet: str) -> None:
    with joined(me, "services", meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp
        import optax

        n, rank = me.world_size, me.rank
        tree = {
            "one": jnp.arange(3.0) * (rank + 1),
            "half": jnp.ones(5, jnp.bfloat16) * rank,
            "many": [jnp.full((7, k), float(rank)) for k in (1, 2, 30, 400)],
            "alone": jnp.ones(3000) * rank,
        }
        average = fj.average_gradients(group, bucket_bytes=2000)
        got, state = jax.jit(average.update)(tree, average.init(tree))
        assert isinstance(state, optax.EmptyState)
        np.testing.assert_allclose(got["one"], np.arange(3.0) * (n + 1) / 2)
        for each, before in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
            assert (each.shape, each.dtype) == (before.shape, before.dtype)
        for each in got["many"]:
            assert np.unique(each).tolist() == [(n - 1) / 2]
        assert np.unique(got["alone"]).tolist() == [(n - 1) / 2]


def test_gradients_of_a_tree_are_averaged(launch: Launch) -> None:
    launch(averaged, 3, free_address(), at=ALONE).results()


def fed_back(me: Me, meet: str, wire_dtype: Packed) -> None:
    with joined(me, "services", meet, wire_dtype=wire_dtype) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        draw = np.random.default_rng(7)
        all_ = draw.standard_normal((me.world_size, 9000)).astype(np.float32)
        tree = {"w": jnp.asarray(all_[me.rank]), "b": jnp.ones(3, jnp.bfloat16) * me.rank}
        average = fj.average_gradients(group, error_feedback=True)
        state, update = average.init(tree), jax.jit(average.update)
        missing = np.zeros_like(all_)
        for _ in range(5):
            got, state = update(tree, state)
            sent = all_.copy()
            for each, rest in zip(sent, missing, strict=True):
                address = each.ctypes.data
                _fanin.feed_back(address, 9000, "float32", rest.ctypes.data, wire_dtype)
            np.testing.assert_array_equal(state.residuals[0], missing[me.rank])
            # The services round the sum: by a 31st of the largest, among 32 neighbours, or to the
            # next level.
            most = np.abs(sent).sum(0).max() / (31 if wire_dtype == "int8" else 2)
            np.testing.assert_allclose(got["w"], sent.mean(0), 0, most)
            assert got["b"].tolist() == [(me.world_size - 1) / 2] * 3
        part = 63 if wire_dtype == "int8" else 3
        assert 0 < np.abs(missing).max() < np.abs(all_).max() / part


@pytest.mark.parametrize("wire_dtype", PACKED)
def test_what_rounding_takes_comes_with_the_next_gradients(
    launch: Launch, wire_dtype: Packed
) -> None:
    launch(fed_back, 2, free_address(), wire_dtype, at=ALONE).results()


def without_copies(me: Me, meet: str) -> None:
    with joined(me, "memory", meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        given = jnp.ones(1 << 20) * (me.rank + 1)
        before = given.unsafe_buffer_pointer()
        got = jax.jit(lambda x: fj.all_reduce(x, group), donate_argnums=0)(given)
        assert got.unsafe_buffer_pointer() == before
        assert given.is_deleted()
        assert np.unique(got).tolist() == [3]


def test_what_is_donated_is_summed_in_its_place(launch: Launch) -> None:
    launch(without_copies, 2, free_address(), at=ALONE).results()


def loses_a_rank(me: Me, meet: str) -> str:
    group = joined(me, "services", meet)
    import fanin.jax as fj
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x: fj.all_reduce(x, group))
    step(jnp.ones(10)).block_until_ready()
    me.say("ready")
    if me.rank == 1:
        me.hear()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        for _ in iter(lambda: step(jnp.ones(10)).block_until_ready(), None):
            pass
    assert isinstance(group.client.failure(), errors.RankLost)
    group.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="Closed"):
        step(jnp.ones(10)).block_until_ready()
    return str(caught.value)


def test_a_rank_that_is_killed_is_named_through_xla(launch: Launch) -> None:
    ranks = launch(loses_a_rank, 3, free_address(), at=ALONE)
    for rank in range(3):
        assert ranks.hear(rank) == "ready"
    ranks.kill(1)
    for rank in (0, 2):
        assert "RankLost: rank 1" in ranks.result(rank)


def refused(me: Me, meet: str) -> None:
    with joined(me, "memory", meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        for wrong, told in (
            (lambda: fj.all_reduce(jnp.ones(2), group, MEAN), "op is 'mean'"),
            (lambda: fj.broadcast(jnp.ones(2), group, 2), "rank 2 is not in a group of 2"),
            (lambda: jax.jit(lambda x: fj.reduce_scatter(x, group))(jnp.ones(3)), "2 equal parts"),
            (lambda: fj.average_gradients(group, error_feedback=True), "is for a group of wire"),
            (lambda: fj.all_reduce(jnp.ones(2), group, "band"), "for integers and booleans"),
            (lambda: fj.all_reduce(jnp.array([True]), group, "avg"), "cannot combine booleans"),
            (lambda: fj.all_gather(jnp.ones(2, jnp.float8_e5m2), group), "cannot sum or send"),
        ):
            with pytest.raises((TypeError, ValueError), match=told):
                wrong()
        assert fj.all_reduce(jnp.ones(2), group).tolist() == [2, 2]


def misfits(me: Me, meet: str) -> None:
    with joined(me, "memory", meet, wire_dtype="int8") as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp

        average = fj.average_gradients(group, error_feedback=True)
        # Integers have no gradient, as Equinox has it.
        parameters = {"a": jnp.ones(5000), "n": jnp.arange(3), "z": jnp.ones(6000)}
        gradients = {"a": jnp.ones(5000), "n": None, "z": jnp.ones(6000) * me.rank}
        got, state = jax.jit(average.update)(gradients, average.init(parameters))
        assert [each.size for each in state.residuals] == [11_000]
        assert got["n"] is None
        other = fj.average_gradients(group, error_feedback=True, bucket_bytes=20_000)
        with pytest.raises(ValueError, match="the state does not fit the gradients"):
            jax.jit(average.update)(gradients, other.init(parameters))


def test_a_state_that_does_not_fit_is_refused(launch: Launch) -> None:
    launch(misfits, 2, free_address(), at=ALONE).results()


def of_several_devices(me: Me, meet: str) -> None:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    with joined(me, "memory", meet) as group:
        import fanin.jax as fj
        import jax
        import jax.numpy as jnp
        from jax import sharding

        mesh = jax.make_mesh((2,), ("x",))
        of_jax: Any = sharding
        along = of_jax.NamedSharding(mesh, of_jax.PartitionSpec("x"))
        cut = jax.device_put(jnp.arange(4.0), along)
        with pytest.raises(ValueError, match="ordered effects are not supported for more than 1"):
            jax.jit(lambda x: fj.all_reduce(x, group))(cut)
        # In a program of its own, after the sum over the devices.
        whole = jax.device_put(jax.jit(lambda x: x.sum())(cut), jax.devices()[0])
        assert fj.all_reduce(whole, group) == 12


def test_a_program_with_a_collective_is_for_one_device(launch: Launch) -> None:
    launch(of_several_devices, 2, free_address(), at=ALONE).results()


def is_interrupted(me: Me, meet: str) -> str:
    group = joined(me, "memory", meet)
    import fanin.jax as fj
    import jax.numpy as jnp

    fj.all_reduce(jnp.ones(10), group).block_until_ready()
    me.say("ready")
    told = "not interrupted"
    if me.rank == 1:
        me.hear()
    try:
        # So short that XLA runs it on this thread.
        got = fj.all_reduce(jnp.ones(10), group)
        if me.rank == 0:
            # The interruption was held back, and comes in here at the latest.
            time.sleep(5)
    except KeyboardInterrupt:
        told = "interrupted"
    assert fj.all_reduce(jnp.ones(3), group).tolist() == [2, 2, 2]
    if me.rank == 1:
        assert got.tolist() == [2] * 10
    group.close()
    return told


def test_an_interrupted_collective_ends_first(launch: Launch) -> None:
    ranks = launch(is_interrupted, 2, free_address(), at=ALONE)
    for rank in range(2):
        assert ranks.hear(rank) == "ready"
    # It is to be within the collective by now, which nothing tells.
    time.sleep(0.5)
    pid = ranks.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    # The other rank comes after it.
    time.sleep(0.5)
    ranks.tell(1, "go on")
    assert ranks.results() == ["interrupted", "not interrupted"]


def test_what_cannot_be_done_is_refused_as_it_is_traced(launch: Launch) -> None:
    launch(refused, 2, free_address(), at=ALONE).results()


BY_JAX = """
import os, sys
import jax
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
import jax.numpy as jnp
import fanin.jax as fj

for again in range(2):
    with fj.connect() as group:
        assert group.rank == jax.process_index()
        ranks = fj.all_gather(jnp.int32(group.rank), group)
        os.write(1, f"{group.rank} of {group.world_size}: {ranks}\\n".encode())
"""


def test_processes_of_jax_meet_in_its_own_store(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(BY_JAX)
    environment = {"JAX_PLATFORMS": "cpu", "RANK": "", "WORLD_SIZE": "", "FANIN_SWITCH": ""}
    meet = free_address()
    programs = [
        Program([sys.executable, str(file), meet, "3", str(rank)], environment) for rank in range(3)
    ]
    try:
        for rank, program in enumerate(programs):
            assert program.wait() == 0, program.text()
            assert program.lines.count(f"{rank} of 3: [0 1 2]") == 2, program.text()
    finally:
        for program in programs:
            program.end()


def test_the_gpt_learns_as_in_one_process(tmp_path: Path) -> None:
    host, port = free_address().split(":")
    curves = []
    for ranks in (1, 4):
        file = tmp_path / f"{ranks}.json"
        command = [sys.executable, str(EXAMPLE), "--steps", "8", "--batch", str(8 // ranks)]
        # Five processes compile, beside other tests: a small network, and not for speed.
        command += [
            "--layers",
            "1",
            "--width",
            "32",
            "--context",
            "32",
            "--learning-rate",
            "0.01",
            "--json",
            str(file),
        ]
        said = {"MASTER_ADDR": host, "MASTER_PORT": port, "JAX_PLATFORMS": "cpu"}
        said |= {"XLA_FLAGS": COMPILES_SOON, "PYTHONFAULTHANDLER": "1", "FANIN_SWITCH": ""}
        programs = [
            Program(command, said | {"RANK": str(rank), "WORLD_SIZE": str(ranks)})
            for rank in range(ranks)
        ]
        try:
            for program in programs:
                assert program.wait(120) == 0, program.text()
        except AssertionError as error:
            # The first that did not end may wait for another: all tell where they are.
            under_way = [each for each in programs if each.process.poll() is None]
            for program in under_way:
                program.signal(signal.SIGABRT)
            for program in under_way:
                program.wait()
            texts = [f"rank {rank}:\n{each.text()}" for rank, each in enumerate(programs)]
            raise AssertionError("\n".join(texts)) from error
        finally:
            for program in programs:
                program.end()
        curves.append(json.loads(file.read_text()))
    alone, together = curves
    assert len(alone) == 8
    assert alone[-1] < alone[0] - 0.5
    np.testing.assert_allclose(together, alone, 1e-6)

"""`fanin.horovod.tensorflow`: collectives, gradients, tapes, and ranks that are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from array_ranks import ALONE
from conftest import Launch, free_address
from fanin import errors
from ranks import DEADLINE, Me
from tensorflow_ranks import ENVIRONMENT, loaded


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    with loaded("tensorflow"):
        yield


# Dtypes of TensorFlow, and how far an average of small numbers may be off.
DTYPES = {
    "float32": 1e-6,
    "float64": 1e-12,
    "float16": 1e-2,
    "bfloat16": 4e-2,
    "int32": 0,
    "int64": 0,
    "uint8": 0,
    "int8": 0,
    "int16": 0,
    "uint16": 0,
}


# These dtypes are tried inside of a function, too; each has its own graph.
IN_GRAPH = ("float32", "bfloat16", "int8")


def each_operation(me: Me, dtypes: list[str]) -> None:
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    n, rank = me.world_size, me.rank
    assert (hvd.rank(), hvd.size(), hvd.local_size()) == (rank, n, n)

    def of(rank: int) -> Any:
        """The values of a rank, as float64; small enough for a sum in int8."""
        return np.arange(2 * n * 3).reshape(2 * n, 3) % 7 + rank

    def operations(x: Any) -> dict[str, Any]:
        gathered, counted = hvd.grouped_allgather([x[: rank + 1], tf.fill([rank], rank)])
        rows, received = hvd.alltoall(x[: n * (n - 1) // 2], list(range(n)))
        return {
            "sum": hvd.allreduce(x, op=hvd.Sum),
            "average": hvd.allreduce(x),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0),
            "least": hvd.allreduce(x, op=hvd.Min),
            "largest": hvd.allreduce(x, op=hvd.Max),
            "product": hvd.allreduce(x[:1], op=hvd.Product),
            "group": hvd.grouped_allreduce([x, tf.cast(x, tf.int64), x + x], op=hvd.Sum),
            "gathered": gathered,
            "counted": counted,
            "sent": hvd.broadcast(x, n - 1),
            "number": hvd.broadcast(x[0, 0], 0),
            "exchanged": hvd.alltoall(x),
            "rows": rows,
            "received": received,
            "scattered": hvd.reducescatter(x[: 2 * n - 1], op=hvd.Sum),
        }

    # An average or a factor of integers is cut off, as Horovod's.
    whole = [of(each) for each in range(n)]
    total = sum(whole)
    parts = np.array_split(total[: 2 * n - 1], n)[rank]
    starts = np.cumsum([0, *range(n)])
    expected = {
        "sum": total,
        "average": total / n,
        "scaled": total,
        "least": whole[0],
        "largest": whole[-1],
        "product": np.prod([each[:1] for each in whole], 0),
        "group": [total, total, 2 * total],
        "gathered": np.concatenate([each[: i + 1] for i, each in enumerate(whole)]),
        "counted": np.concatenate([np.full(i, i) for i in range(n)]),
        "sent": whole[-1],
        "number": whole[0][0, 0],
        "exchanged": np.concatenate([each[2 * rank : 2 * rank + 2] for each in whole]),
        "rows": np.concatenate([each[starts[rank] : starts[rank + 1]] for each in whole]),
        "received": np.full(n, rank),
        "scattered": parts,
    }
    in_graph = tf.function(operations, autograph=False)
    for name in dtypes:
        dtype, tolerance = tf.as_dtype(name), DTYPES[name]
        x = tf.cast(of(rank), dtype)
        for way in (operations, in_graph) if name in IN_GRAPH else (operations,):
            got = way(x)
            for what, wanted in expected.items():
                if what == "scaled" and not dtype.is_floating:
                    halves = [(each * 0.5).astype(np.int64) for each in whole]
                    wanted = sum(halves) * 2
                elif what == "average" and not dtype.is_floating:
                    wanted = np.trunc(wanted)
                for one, of_it in zip(tf.nest.flatten(got[what]), _listed(wanted), strict=True):
                    assert one.shape == np.shape(of_it), (name, what)
                    np.testing.assert_allclose(
                        np.asarray(one, np.float64), of_it, tolerance, err_msg=f"{name} {what}"
                    )
            dtypes = [each.dtype for each in got["group"]]
            assert dtypes == [dtype, tf.int64, dtype]
            assert got["sum"].dtype == got["exchanged"].dtype == dtype
    truths = hvd.allgather(tf.constant([rank == 1]))
    assert truths.numpy().tolist() == [each == 1 for each in range(n)]
    in_half = hvd.allreduce(tf.fill([3], 1 + 2**-12), compression=hvd.Compression.fp16)
    assert (in_half.dtype, in_half.numpy().tolist()) == (tf.float32, [1.0] * 3)
    assert hvd.allgather_object("x" * rank) == ["x" * each for each in range(n)]
    assert hvd.broadcast_object({"rank": rank}, n - 1) == {"rank": n - 1}
    numbers = tf.function(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op()])()
    assert [int(each) for each in numbers] == [rank, n, rank]
    variables = [tf.Variable([float(rank)] * each) for each in range(1, 4)]
    hvd.broadcast_variables(variables, 1)
    assert [each.numpy().tolist() for each in variables] == [[1.0] * k for k in range(1, 4)]
    with pytest.raises(RuntimeError, match=r"call hvd\.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    # Whoever is early adds zeros.
    if rank:
        assert hvd.allreduce(tf.ones(2), op=hvd.Sum, name="late").numpy().tolist() == [n - 1.0] * 2
    last = int(hvd.join())
    assert 0 <= last < n
    hvd.shutdown()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(("ranks", "dtypes"), [(2, list(DTYPES)), (4, ["float32", "int64"])])
def test_each_operation_is_numpys_outside_and_inside_of_a_function(
    launch: Launch, ranks: int, dtypes: list[str]
) -> None:
    launch(each_operation, ranks, dtypes, at=ALONE).results()


def gradients(me: Me) -> None:
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    n, rank = me.world_size, me.rank
    x = tf.reshape(tf.range(2.0 * n), [2 * n, 1]) + rank
    whole = np.stack([np.arange(2.0 * n).reshape(-1, 1) + each for each in range(n)])
    # Horovod's: of an average, of what joins and of what is sent, the mean of all ranks' losses.
    splits = [2] + [1] * (n - 1)
    weights = np.arange(1.0, 2 * n * n + 1).reshape(-1, 1)
    of_all = {
        "sum": (lambda x: hvd.allreduce(x**2, op=hvd.Sum) * (rank + 1), n * (n + 1) * whole[rank]),
        "average": (lambda x: hvd.allreduce(x**2) * (rank + 1), (n + 1) * whole[rank]),
        "gathered": (
            lambda x: hvd.allgather(x) * weights.astype(np.float32),
            weights[2 * n * rank : 2 * n * (rank + 1)],
        ),
        "sent": (
            lambda x: hvd.broadcast(x, 1) * (rank + 1),
            np.full_like(whole[0], (n + 1) / 2 if rank == 1 else 0),
        ),
        "exchanged": (
            lambda x: hvd.alltoall(x, splits)[0] * (rank + 1),
            np.array([1, *range(1, n + 1), *[0] * (n - 1)]).reshape(-1, 1),
        ),
        "scattered": (
            lambda x: hvd.reducescatter(x, op=hvd.Sum) * (rank + 1),
            n * np.repeat(np.arange(1.0, n + 1), 2).reshape(-1, 1),
        ),
    }
    for name, (forward, expected) in of_all.items():

        def gradient(x: Any, forward: Any = forward) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(forward(x))
            return tape.gradient(loss, x)

        for way in (gradient, tf.function(gradient, autograph=False)):
            np.testing.assert_allclose(way(x), expected, 1e-6, err_msg=name)
    hvd.shutdown()


def test_gradients_of_collectives_are_horovods(launch: Launch) -> None:
    launch(gradients, 3, at=ALONE).results()


def in_sets(me: Me) -> None:
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    even = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[even])
    odd = hvd.add_process_set([1, 3])
    mine, other = (even, odd) if me.rank % 2 == 0 else (odd, even)

    def of_set(x: Any) -> list[Any]:
        total = hvd.allreduce(x, op=hvd.Sum, process_set=mine)
        first = hvd.broadcast(x, mine.ranks[1], process_set=mine)
        return [total, first, hvd.allgather(x, process_set=mine)]

    for way in (of_set, tf.function(of_set, autograph=False)):
        got = [each.numpy().tolist() for each in way(tf.constant([float(me.rank)]))]
        ranks = [float(each) for each in mine.ranks]
        assert got == [[sum(ranks)], ranks[1:], ranks]
    with pytest.raises(ValueError, match="is not in ProcessSet"):
        hvd.allreduce(tf.ones(1), process_set=other)
    # Whoever is not in the set has its own gradients.
    weight = tf.Variable([2.0])
    with tf.GradientTape() as tape:
        loss = weight * (me.rank + 1.0)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, process_set=even)
    (got,) = tape.gradient(loss, [weight])
    assert got.numpy().tolist() == [4.0 if me.rank in (0, 2) else me.rank + 1.0]
    assert int(hvd.size_op(even.process_set_id or 0)) == 2
    assert int(hvd.process_set_included_op(odd.process_set_id or 0)) == me.rank % 2
    assert hvd.remove_process_set(odd)
    if me.rank % 2 == 0:
        assert hvd.broadcast_object(me.rank, 2, process_set=even) == 2
    hvd.barrier()
    hvd.shutdown()


def test_sets_of_ranks_have_collectives_of_their_own(launch: Launch) -> None:
    launch(in_sets, 4, at=ALONE).results()


def makes_mistakes(me: Me) -> None:
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    mistakes = {
        "the shape": lambda: hvd.allreduce(tf.zeros(2 + me.rank)),
        "the dtype": lambda: hvd.allgather(tf.zeros(2, tf.float32 if me.rank else tf.int32)),
        "the root rank": lambda: hvd.broadcast(tf.zeros(2), me.rank),
        "the op": lambda: hvd.allreduce(tf.zeros(2), op=hvd.Min if me.rank else hvd.Max),
        "no Min of": lambda: hvd.allreduce(tf.zeros(2, tf.complex64), op=hvd.Min),
    }
    told: str
    mistake: Any
    for told, mistake in mistakes.items():
        with pytest.raises(hvd.HorovodInternalError, match=told) as caught:
            mistake()
        assert isinstance(caught.value, tf.errors.FailedPreconditionError)
        with pytest.raises(tf.errors.UnknownError, match=f"HorovodInternal|Disagreement.*{told}"):
            tf.function(mistake, autograph=False)()
    for splits in ([5, 0], [1], [-1, 1]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="splits are"):
            hvd.alltoall(tf.zeros(4), splits)
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(NotImplementedError, match="sparse_as_dense=True"):
        hvd.allreduce(slices, prescale_factor=2.0)
    with pytest.raises(TypeError, match="cannot take"):
        hvd.allreduce(tf.constant(["text"]))
    import fanin.horovod as of_torch

    with pytest.raises(ValueError, match=r"call its shutdown\(\) before fanin.horovod.init"):
        of_torch.init()
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist() == [2.0, 2.0]
    hvd.shutdown()
    of_torch.init()
    with pytest.raises(ValueError, match=r"fanin\.horovod is initialized in this process"):
        hvd.allreduce(tf.ones(2))
    assert hvd.allgather_object(me.rank) == [0, 1]
    of_torch.shutdown()


@pytest.mark.parametrize(("dtype", "size"), [("int8", 128), ("uint8", 256), ("int32", 3)])
def test_an_integer_average_may_be_of_more_ranks_than_its_dtype_holds(
    dtype: str, size: int
) -> None:
    from fanin.horovod.array_execution import truncated_average

    summed = np.array([np.iinfo(dtype).min, 7, np.iinfo(dtype).max], dtype)
    got = truncated_average(summed, size)
    assert got.dtype == dtype
    assert got.tolist() == [int(each / size) for each in summed.tolist()]


def test_mistakes_are_told_to_all_ranks_of_tensorflow_and_all_go_on(launch: Launch) -> None:
    launch(makes_mistakes, 2, at=ALONE).results()


STEPS = 4
VOCABULARY, WIDTH, BATCH = 11, 3, 8


def curve(reduce: Any, words: Any, targets: Any, in_graph: bool) -> list[Any]:
    """The weights of an embedding with a layer, after some steps of gradient descent."""
    import tensorflow as tf

    draw = np.random.default_rng(5)
    table = tf.Variable(draw.standard_normal((VOCABULARY, WIDTH)).astype(np.float32))
    weight = tf.Variable(draw.standard_normal((WIDTH, 1)).astype(np.float32))
    bias = tf.Variable(tf.zeros(1))
    weights = [table, weight, bias]

    def step(words: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(tf.nn.embedding_lookup(table, words))
            loss = tf.reduce_mean((hidden @ weight + bias - targets) ** 2)
        gradients = reduce(tape, weights).gradient(loss, weights)
        for variable, gradient in zip(weights, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(0.3 * gradient.values, gradient.indices))
            else:
                variable.assign_sub(0.3 * gradient)

    step = tf.function(step, autograph=False) if in_graph else step
    for at in range(STEPS):
        step(words[at], targets[at])
    return [each.numpy() for each in weights]


def trains(me: Me) -> None:
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    draw = np.random.default_rng(3)
    words = draw.integers(0, VOCABULARY, (STEPS, BATCH))
    targets = draw.standard_normal((STEPS, BATCH, 1)).astype(np.float32)
    alone = curve(lambda tape, _: tape, words, targets, True)
    part = BATCH // me.world_size
    mine = slice(me.rank * part, (me.rank + 1) * part)
    fp16 = hvd.Compression.fp16
    ways: dict[str, tuple[Any, float]] = {
        "as they are": (lambda tape, _: hvd.DistributedGradientTape(tape), 1e-5),
        "dense": (lambda tape, _: hvd.DistributedGradientTape(tape, sparse_as_dense=True), 1e-5),
        "in halves": (lambda tape, _: hvd.DistributedGradientTape(tape, compression=fp16), 2e-2),
        "in two groups": (lambda tape, _: hvd.DistributedGradientTape(tape, groups=2), 1e-5),
        "in lists": (lambda tape, of: hvd.DistributedGradientTape(tape, groups=[of[1:]]), 1e-5),
        "divided before": (
            lambda tape, _: hvd.DistributedGradientTape(
                tape, gradient_predivide_factor=2.0, sparse_as_dense=True
            ),
            1e-5,
        ),
    }
    for name, (way, tolerance) in ways.items():
        for in_graph in (False, True):
            got = curve(way, words[:, mine], targets[:, mine], in_graph)
            for ours, theirs in zip(got, alone, strict=True):
                np.testing.assert_allclose(ours, theirs, tolerance, tolerance, err_msg=name)
    # The gradient of a local source is its rank's, over the number of ranks.
    kept = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = kept * (me.rank + 1.0)
    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(kept)
    local, shared = tape.get_local_and_global_gradients(loss, [kept])
    assert local[0][1].numpy().tolist() == [(me.rank + 1.0) / me.world_size]
    assert shared == []
    with pytest.raises(ValueError, match="op must be Average"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups is -1"):
        hvd.DistributedGradientTape(tape, groups=-1)
    hvd.shutdown()


def test_a_tapes_gradients_train_as_one_process_with_the_whole_batch(launch: Launch) -> None:
    launch(trains, 2, at=ALONE).results()


def begins_early(_: Me) -> None:
    import threading

    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf
    from fanin.horovod.world import world

    hvd.init()
    submitted = threading.Event()
    submit = world().engine.submit

    def noted(*args: Any, **keywords: Any) -> Any:
        submitted.set()
        return submit(*args, **keywords)

    world().engine.submit = noted  # type: ignore[method-assign]
    first, last = tf.Variable([2.0]), tf.Variable([3.0])

    def hold(gradient: Any) -> Any:
        # The backward pass of the first layer goes on once the last one's gradient is submitted.
        assert submitted.wait(DEADLINE)
        return gradient

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def held(x: Any) -> Any:
        return tf.identity(x), lambda g: tf.ensure_shape(
            tf.numpy_function(hold, [g], tf.float32, stateful=False), [1]
        )

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = held(first * 5.0) * last
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [first, last])

    of_first, of_last = step()
    assert (of_first.numpy().tolist(), of_last.numpy().tolist()) == ([30.0], [20.0])
    hvd.shutdown()


def test_sums_begin_while_backward_goes_on(launch: Launch) -> None:
    launch(begins_early, 2, at=ALONE).results()


def of_collectives(x: Any) -> list[Any]:
    """Gradients of collectives, in which ranks and their number count, and of the ranks of rows."""
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        results = [hvd.allgather(x) ** 2, hvd.broadcast(x, 1), hvd.reducescatter(x, op=hvd.Sum)]
    number = hvd.size_op()
    _, received = hvd.alltoall(x, tf.fill([number], 6 // number))
    return [*(tape.gradient(result, x) for result in results), tf.shape(received)[0]]


def goes_on(me: Me, in_graph: bool) -> tuple[int, float, str]:
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf
    from fanin.horovod.tensorflow import bridge

    hvd.init()
    weight = tf.Variable([float(me.rank)])
    state = hvd.elastic.TensorFlowState([weight], step=0)
    caught = []

    def sum_of(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    step = tf.function(sum_of) if in_graph else sum_of
    differentiated = tf.function(of_collectives) if in_graph else of_collectives
    first, last = tf.Variable([2.0]), tf.Variable([3.0])

    def of_two() -> Any:
        with tf.GradientTape() as tape:
            loss = first * last
        return hvd.DistributedGradientTape(tape).gradient(loss, [first, last])

    reduced = tf.function(of_two) if in_graph else of_two

    @hvd.elastic.run
    def train(state: Any) -> int:
        # Traced once, with three ranks.
        number, rank = hvd.size(), hvd.rank()
        got = [int(tf.reduce_max(each)) for each in differentiated(tf.fill([6, 1], rank + 1.0))]
        assert got == [2 * (rank + 1), int(rank == 1), number, number]
        while state.step < 6:
            try:
                weight.assign_add(step(tf.ones(1)))
                state.step += 1
                if state.step == 4 and hvd.size() == 3:
                    me.say("there")  # two steps after the commit
                    if me.rank == 1:
                        me.hear()
                reduced()
            except (hvd.HorovodInternalError, tf.errors.OpError) as error:
                caught.append(f"{type(error).__name__}: {error}")
                raise
            if state.step % 2 == 0 and state.step != 4:
                state.commit()
        return hvd.size()

    size = train(state)
    hvd.shutdown()
    assert len(caught) == 1
    assert not bridge._begun
    return size, float(weight[0]), caught[0]


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_state_is_restored_and_training_goes_on_without_a_rank_that_is_lost(
    launch: Launch, in_graph: bool
) -> None:
    ranks = launch(goes_on, 3, in_graph, at=ALONE)
    for rank in range(3):
        assert ranks.hear(rank) == "there"
    ranks.kill(1)
    for rank in (0, 2):
        # Two steps with three ranks from rank 0's 0.0, and the commit; then four with two.
        size, weight, caught = ranks.result(rank)
        assert (size, weight) == (2, 2 * 3 + 4 * 2)
        assert "UnknownError" in caught if in_graph else "HorovodInternalError" in caught
        assert "rank 1" in caught


def met_at_an_address(me: Me, address: str) -> str:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "FANIN_SWITCH"):
        os.environ.pop(name)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")
    import fanin.horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    assert hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy().tolist() == [2.0] * 3
    hvd.shutdown()
    hvd.init()
    me.say("again")
    if me.rank == 1:
        me.hear()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1") as caught:
        hvd.allreduce(tf.ones(3), op=hvd.Sum)
    assert isinstance(caught.value.__cause__, errors.RankLost)
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError) as apart:
        hvd.init()
    return str(apart.value)


def test_ranks_meet_at_an_address_and_name_one_that_is_lost(launch: Launch) -> None:
    ranks = launch(met_at_an_address, 2, free_address(), at=ALONE)
    for rank in range(2):
        assert ranks.hear(rank) == "again"
    ranks.kill(1)
    assert "a launcher that has a store" in ranks.result(0)


WITHOUT_TORCH = """
import os
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("there is no torch here", name="torch")

sys.meta_path.insert(0, Blocked())
import fanin.horovod
import fanin.horovod.keras
import fanin.horovod.tensorflow as hvd
import fanin.horovod.tensorflow.keras.callbacks
import fanin.horovod.tensorflow.keras.elastic
import tensorflow as tf

hvd.init()
assert hvd.allreduce(tf.ones(2)).numpy().tolist() == [1.0, 1.0]

# The graph of one rank: other ranks may join an elastic job later.
from fanin._elastic_members import ELASTIC

def reduced(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = x * x
    return hvd.DistributedGradientTape(tape).gradient(loss, x)

for said, calls in (("", 0), ("1", 2)):
    os.environ[ELASTIC] = said
    traced = tf.function(reduced).get_concrete_function(tf.TensorSpec([1]))
    operations = [each.type for each in traced.graph.get_operations()]
    assert operations.count("PyFunc") == calls, operations
    assert traced(tf.constant([3.0])).numpy().tolist() == [6.0]
del os.environ[ELASTIC]
assert hvd.elastic.TensorFlowKerasState is fanin.horovod.keras.elastic.KerasState
hvd.shutdown()
assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
try:
    fanin.horovod.allreduce
except ModuleNotFoundError as missing:
    print(missing)
"""


def test_tensorflow_and_keras_need_no_torch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "FANIN_SWITCH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env=environment | ENVIRONMENT,
        timeout=2 * DEADLINE,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert 'pip install "torch' in done.stdout

"""`fanin.horovod.keras` on each backend: training, callbacks, models that are saved, elastic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_ranks import ALONE
from conftest import Launch
from ranks import Me
from tensorflow_ranks import ENVIRONMENT, loaded

BACKENDS = ("tensorflow", "torch", "jax")
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_keras.py"


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with loaded(request.param):
        yield request.param


ROWS, EPOCHS = 24, 2


def digits() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((ROWS, 5)).astype(np.float32)
    return x, (x @ draw.standard_normal((5, 1))).astype(np.float32)


def made(optimizer: Any, seed: int = 1, *, eagerly: bool = False) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(4, activation="tanh"), layers.Dense(1)]
    )
    compiled = keras.backend.backend() == "jax" and not eagerly
    model.compile(optimizer, "mse", run_eagerly=eagerly, jit_compile=compiled)
    return model


def weights(model: Any) -> Any:
    return np.concatenate([np.asarray(each).reshape(-1) for each in model.get_weights()])


def trains(me: Me, folder: str) -> None:
    import fanin.horovod.keras as hvd
    import keras

    hvd.init()
    n, rank = me.world_size, me.rank
    x, y = digits()
    alone = made(keras.optimizers.Adam(0.05))
    alone.fit(x, y, batch_size=ROWS, epochs=EPOCHS, shuffle=False, verbose=0)
    expected = weights(alone)
    mine = slice(rank * ROWS // n, (rank + 1) * ROWS // n)

    def fitted(optimizer: Any, parts: int = 1, *, eagerly: bool = False) -> Any:
        model = made(optimizer, seed=1, eagerly=eagerly)
        step = ROWS // n // parts
        told = model.fit(
            x[mine],
            y[mine],
            batch_size=step,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        )
        return model, told.history["loss"]

    on_jax = keras.backend.backend() == "jax"
    ways: list[tuple[dict[str, Any], float]] = [
        ({}, 1e-5),
        ({"groups": 2, "gradient_predivide_factor": 2.0}, 1e-5),
        ({"compression": hvd.Compression.fp16}, 1e-2),
    ]
    # JAX compiles each model anew, which takes long.
    for keywords, tolerance in ways[::2] if on_jax else ways:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), **keywords)
        model, losses = fitted(optimizer)
        np.testing.assert_allclose(weights(model), expected, tolerance, tolerance)
        of_all = hvd.allgather(np.array([losses]))
        assert (of_all == of_all[0]).all()

    # Passes that are added up: the momentum, and the step, come with the last one alone.
    both = keras.optimizers.SGD(0.05, momentum=0.5)
    alone = made(keras.optimizers.SGD(0.05, momentum=0.5))
    alone.fit(x, y, batch_size=ROWS, epochs=EPOCHS, shuffle=False, verbose=0)
    model, _ = fitted(
        hvd.DistributedOptimizer(
            both, backward_passes_per_step=2, average_aggregated_gradients=True
        ),
        parts=2,
        eagerly=on_jax,
    )
    np.testing.assert_allclose(weights(model), weights(alone), 1e-5, 1e-5)
    assert int(model.optimizer.iterations) == 2 * EPOCHS

    # A model that was saved knows nothing of fanin; loaded, it goes on where it was.
    path = f"{folder}/{rank}.keras"
    model.save(path)
    assert "fanin" not in str(keras.saving.serialize_keras_object(model.optimizer))
    again = hvd.load_model(path)
    assert type(again.optimizer).__name__ == "SGD"
    again.compile(again.optimizer, "mse", run_eagerly=model.run_eagerly, jit_compile=False)
    again.fit(x[mine], y[mine], batch_size=ROWS // n, verbose=0)
    alone.fit(x, y, batch_size=ROWS, verbose=0)
    np.testing.assert_allclose(weights(again), weights(alone), 1e-5, 1e-5)

    assert float(hvd.allreduce(rank + 1.0, op=hvd.Sum)) == n * (n + 1) / 2
    assert hvd.allgather(np.full(rank, rank)).tolist() == [k for k in range(n) for _ in range(k)]
    assert hvd.broadcast(np.full(2, rank), n - 1).tolist() == [n - 1] * 2
    assert hvd.reducescatter(np.arange(float(n)), op=hvd.Sum).tolist() == [float(n * rank)]
    with pytest.raises(ValueError, match="Adasum is not for Keras's optimizers"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)
    hvd.shutdown()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_model_learns_as_in_one_process(launch: Launch, backend: str, tmp_path: Path) -> None:
    launch(trains, 2, str(tmp_path), at=ALONE).results()
    if backend == "jax":
        launch(alone_on_jax, 1, at=ALONE).results()


def alone_on_jax(me: Me) -> None:
    import fanin.horovod.keras as hvd
    import keras
    from fanin.horovod.keras.tensors import to_array

    assert me.world_size == 1
    import jax

    with pytest.raises(hvd.NotInJit, match="run_eagerly=True"):
        jax.jit(to_array)(keras.ops.ones(3))
    passes = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    with pytest.raises(hvd.NotInJit, match="gradient_accumulation_steps"):
        made(passes).fit(*digits(), verbose=0)
    hvd.init()
    model = made("sgd")
    first = model.layers[0]
    partial = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=first)
    model.compile(partial, "mse", jit_compile=True)
    with pytest.raises(hvd.NotInJit, match="scale_local_gradients=False"):
        model.fit(*digits(), verbose=0)
    hvd.shutdown()

    # Keras has no values in its variables within an epoch.
    hvd.init()
    forgets_a_pass(hvd)
    model = made(keras.optimizers.SGD(0.1))
    state = hvd.elastic.KerasState(model)
    kept: list[Any] = []

    class Undone(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del logs
            if batch == 1:
                kept.append((weights(model), float(model.optimizer.learning_rate)))
            if batch == 2:
                state.restore()

    rate = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda at: 1.0 - at, staircase=False)
    committed = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    model.fit(*digits(), batch_size=ROWS // 3, verbose=0, callbacks=[rate, committed, Undone()])
    (before, lowered), *_ = kept
    assert lowered == pytest.approx(0.1 * 2 / 3)
    assert int(model.optimizer.iterations) == 2
    np.testing.assert_array_equal(weights(model), before)
    sent = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(*digits(), batch_size=ROWS // 3, verbose=0, callbacks=[sent])
    assert int(model.optimizer.iterations) == 2 + 3
    hvd.shutdown()


def forgets_a_pass(hvd: Any) -> None:
    """A state drops the passes that no step has applied when ranks meet anew."""
    import keras

    optimizer = keras.optimizers.SGD(1.0)
    model = made(hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2))
    state = hvd.elastic.KerasState(model)
    before = weights(model)
    for value in (100.0, 1.0, 2.0):
        gradients = [keras.ops.full(each.shape, value) for each in model.trainable_variables]
        optimizer.apply(gradients, model.trainable_variables)
        if value == 100.0:
            state.on_reset()
    np.testing.assert_allclose(weights(model), before - 3.0, 1e-5, 1e-5)


def calls_back(me: Me) -> None:
    import fanin.horovod.tensorflow.keras as hvd
    import keras

    hvd.init()
    n, rank = me.world_size, me.rank
    x, y = digits()
    rates: list[float] = []

    class Noted(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            rates.append(round(float(self.model.optimizer.learning_rate), 6))

    # Ranks begin with weights of their own, and have the root's after the first batch.
    model = made(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), seed=rank)
    told = model.fit(
        x[rank::n],
        y[rank::n],
        batch_size=6,
        epochs=5,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(1),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2, end_epoch=4),
            hvd.callbacks.LearningRateScheduleCallback(0.1, lambda _: 0.1, start_epoch=4),
            Noted(),
        ],
    )
    of_all = hvd.allgather(weights(model)[np.newaxis])
    assert (of_all == of_all[0]).all()
    # Two batches an epoch: to the whole rate in four batches; then halves of it, and a tenth.
    warming = [0.1 / n * (k / 4 * (n - 1) + 1) for k in range(1, 5)]
    expected = [*warming, 0.1, 0.1, 0.05, 0.05, 0.01, 0.01]
    np.testing.assert_allclose(rates, expected, 1e-5)
    np.testing.assert_allclose(told.history["lr"], expected[1::2], 1e-5)

    # Slices of several passes are added up as a dense gradient.
    import tensorflow as tf

    table = keras.Variable(np.zeros((3, 1), np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for index in (0, 2):
        slices = tf.IndexedSlices(tf.fill([1, 1], rank + 1.0), tf.constant([index]), [3, 1])
        optimizer.apply([slices], [table])
        if not index:
            assert not np.asarray(table).any()
    np.testing.assert_allclose(np.asarray(table).reshape(-1), [-(n + 1) / 2, 0, -(n + 1) / 2])

    forgets_a_pass(hvd)

    # A step that scales its loss: the gradients are reduced as they are, and unscaled then.
    weight = keras.Variable([1.0])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    hvd.DistributedOptimizer(scaled).apply([tf.constant([8.0 * (rank + 1)])], [weight])
    np.testing.assert_allclose(np.asarray(weight), [1.0 - 0.5 * (n + 1) / 2], 1e-6)

    # The weights of a local layer are each rank's own.
    model = made("sgd", seed=rank)
    local = model.layers[0]
    before = [np.array(each) for each in local.get_weights()]
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    model.optimizer = None
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[local])
    gradients = [keras.ops.full(each.shape, rank + 1.0) for each in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    for weight, value in zip(local.get_weights(), before, strict=True):
        # A local gradient is divided by the number of ranks.
        np.testing.assert_allclose(weight, value - 0.1 * (rank + 1) / n, 1e-5, 1e-6)
    shared = hvd.allgather(np.array([np.asarray(model.layers[1].bias)]))
    np.testing.assert_allclose(shared.reshape(-1), -0.1 * (n + 1) / 2, 1e-5)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local.variables)
    model.optimizer = optimizer
    callback.set_model(model)
    kept = [np.array(each) for each in local.get_weights()]
    callback.on_train_batch_end(0)
    for weight, value in zip(local.get_weights(), kept, strict=True):
        np.testing.assert_array_equal(weight, value)
    of_all = hvd.allgather(np.array([np.asarray(model.layers[1].kernel).reshape(-1)]))
    assert (of_all == of_all[0]).all()
    hvd.shutdown()


@pytest.mark.parametrize("backend", ["tensorflow"], indirect=True)
def test_callbacks_keep_ranks_alike_and_set_rates(launch: Launch, backend: str) -> None:
    assert backend == "tensorflow"
    launch(calls_back, 2, at=ALONE).results()


STOPS_AT = (1, 1)
"""The epoch, and the batches of it that are done, when a rank is lost."""


def goes_on(me: Me) -> tuple[int, int, int, int, Any]:
    import fanin.horovod.keras as hvd
    import keras
    from fanin.horovod.keras import elastic

    hvd.init()
    x, y = digits()
    model = made(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5)), seed=me.rank)
    state = elastic.KerasState(model, batch=0, epoch=0)
    seen: list[tuple[int, int, int]] = []

    class Stops(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch, logs
            seen.append((hvd.size(), state.epoch, state.batch))
            if hvd.size() == 3 and (state.epoch, state.batch) == STOPS_AT:
                me.say("there")
                if me.rank == 1:
                    me.hear()

    @elastic.run
    def train(state: Any) -> None:
        # All ranks have all rows: so every number of ranks learns alike.
        while state.epoch < 3:
            left = x[8 * state.batch :], y[8 * state.batch :]
            model.fit(
                *left,
                batch_size=8,
                epochs=1,
                shuffle=False,
                verbose=0,
                callbacks=[
                    elastic.UpdateBatchStateCallback(state),
                    elastic.UpdateEpochStateCallback(state),
                    Stops(),
                    elastic.CommitStateCallback(state, batches_per_commit=2),
                ],
            )

    train(state)
    steps = int(model.optimizer.iterations)
    hvd.shutdown()
    assert seen[-1][0] == 2
    return state.epoch, state.batch, steps, len(seen), weights(model)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"], indirect=True)
def test_fit_goes_on_without_a_rank_that_is_lost(launch: Launch, backend: str) -> None:
    ranks = launch(goes_on, 3, at=ALONE)
    for rank in range(3):
        assert ranks.hear(rank) == "there"
    ranks.kill(1)
    found = [ranks.result(rank) for rank in (0, 2)]
    for epoch, batch, steps, seen, _ in found:
        # Three epochs of three batches; the one without a commit came twice.
        assert (epoch, batch, steps) == (3, 0, 9)
        # A program of JAX may end by an error after Keras has told of its batch.
        assert seen == 10 or (seen == 11 and backend == "jax")
    np.testing.assert_array_equal(found[0][4], found[1][4])


def test_the_example_learns_on_four_ranks() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "FANIN_SWITCH"}
    done = subprocess.run(
        [sys.executable, "-m", "fanin", "run", "-np", "4", str(EXAMPLE), "--epochs", "6"],
        env=environment | ENVIRONMENT,
        timeout=240,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"accuracy (\S+) on 360 digits", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.8

"""Handwritten digits (scikit-learn's 8 x 8 pixels) by Keras, with Horovod's interface.

    fanin run -np 4 examples/digits_keras.py
    KERAS_BACKEND=torch fanin run -np 4 examples/digits_keras.py

Prints the accuracy on digits that were held back.
"""

from __future__ import annotations

import argparse

import fanin.horovod.keras as hvd
import keras
import numpy as np
from sklearn.datasets import load_digits

TRAINED = 1437  # of 1797 images; the rest is for the accuracy


def main() -> None:
    """Train, then count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()

    hvd.init()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(labels))
    pixels, digits = (images[order] / 16.0).astype(np.float32), labels[order]
    # Each rank has its own rows, and as many as the others.
    mine = slice(hvd.rank(), TRAINED // hvd.size() * hvd.size(), hvd.size())

    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)]
    )
    rate = 0.02 * hvd.size()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(
        pixels[mine],
        digits[mine],
        batch_size=32,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
        ],
    )
    guessed = model.predict(pixels[TRAINED:], verbose=0).argmax(axis=1)
    right = float((guessed == digits[TRAINED:]).mean())
    if hvd.rank() == 0:
        print(f"accuracy {right:.3f} on {len(guessed)} digits, after {args.epochs} epochs")
    hvd.shutdown()


if __name__ == "__main__":
    main()

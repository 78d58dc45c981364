"""`DistributedOptimizer` for TensorFlow programs: the optimizers are Keras's."""

from __future__ import annotations

from typing import Any


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, name: str | None = None, use_locking: bool = False, **keywords: Any
) -> Any:
    """Return an optimizer of Keras that reduces gradients over all ranks when it applies.

    The keywords are those of `fanin.horovod.keras.DistributedOptimizer`. Raises `TypeError` for
    optimizers of TensorFlow 1.
    """
    del use_locking
    if not hasattr(optimizer, "apply"):
        raise TypeError(
            f"{type(optimizer).__name__} is no optimizer of Keras 3: use tf.keras.optimizers, or "
            "reduce gradients by hvd.DistributedGradientTape"
        )
    # A program without Keras need not have it: its backend may be another framework.
    from fanin.horovod.keras import optimizer as of_keras

    return of_keras.DistributedOptimizer(optimizer, name, **keywords)

"""Horovod's interface for `tf.keras`: `import fanin.horovod.tensorflow.keras as hvd`.

It is `fanin.horovod.keras`, as TensorFlow's Keras is Keras 3.
"""

from __future__ import annotations

import fanin.horovod.keras as _keras
from fanin.horovod.keras import *  # noqa: F403

__all__ = _keras.__all__

import tensorflow as tf
from fanin.horovod.tensorflow import *  # noqa: F403

from horovod.tensorflow import util as util  # type: ignore[import-not-found]

_executing_eagerly = tf.executing_eagerly

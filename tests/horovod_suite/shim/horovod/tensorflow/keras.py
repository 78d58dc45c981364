from fanin.horovod.tensorflow.keras import *  # noqa: F403

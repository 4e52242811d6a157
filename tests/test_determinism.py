"""Content never depends on timing: each promise of determinism, on real runs of a few steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.determinism import CHECKS, Verdict


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_holds(check: Callable[[Path, int], Verdict], tmp_path: Path) -> None:
    verdict = check(tmp_path, 6)
    assert verdict.bytes_compared > 0
    assert verdict.holds, check.__doc__

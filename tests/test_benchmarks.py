"""Every benchmark runs: its quick form ends with exit code 0 and a last line that is the promised JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from estr_lite.objectives import CATALOGUE
from tests.benchmarks.report import spread

pytestmark = pytest.mark.slow


def quick(name: str, *options: str) -> dict[str, Any]:
    """The result of a benchmark's quick form."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--quick", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["quick"] is True
    return found


def test_a_spread_is_the_median_between_the_smallest_and_the_largest() -> None:
    assert spread("ms", [3.0, 1.0, 2.0]) == {"ms": 2.0, "ms_spread": [1.0, 3.0]}


def test_main_job() -> None:
    found = quick("main_job", "--engine", "transformers")
    assert found["engine"] == "transformers"
    assert 0 <= found["base"] <= 1
    assert len(found["after"]) == 1
    assert found["gain_median"] == pytest.approx(100 * (found["after"][0] - found["before"][0]))
    assert found["train_seconds"] > 0
    bins = found["delta2_by_entropy"].values()
    assert sum(one["tokens"] for one in bins) > 0
    assert all(one["delta2"] >= 0 and 0 <= one["kept"] <= 1 for one in bins)


def test_determinism() -> None:
    found = quick("determinism")
    promises = ("same_seed_identical", "jitter_identical", "zero_lag_equals_sync", "tickets_independent_of_objective")
    assert {name: found[name] for name in promises} == dict.fromkeys(promises, True)
    assert found["bytes_compared"] > 0


@pytest.mark.vllm
def test_engine_contract(vllm_installed: None) -> None:
    found = quick("engine_contract")
    for engine in ("transformers", "vllm"):
        one = found[engine]
        errors = ("logp_max_error", "entropy_max_error", "recompute_max_error", "keep_max_error")
        assert all(0 <= one[name] < 1e-4 for name in errors)
        assert one["keep_vs_recompute_mean"] > 1e-3
        assert one["version_tag_errors"] == 0
        assert one["tokens"] > 1000


@pytest.mark.vllm
def test_entropy_tap(vllm_installed: None) -> None:
    found = quick("entropy_tap")
    low, high = found["ratio_spread"]
    assert 0 < low <= found["ratio"] <= high
    assert 0 < found["share_within_tap"] < 1
    assert found["turns"] >= 7


def test_objective_cost() -> None:
    found = quick("objective_cost")
    assert found["per_objective"].keys() == {kind.__name__ for kind in CATALOGUE}
    assert found["share_of_step"] == max(found["per_objective"].values())
    assert 0 < found["share_of_step"] < 1


def test_publish() -> None:
    found = quick("publish")
    one = found["per_engine"]["transformers keep"]
    assert 0 < one["to_swap_ms"] < found["median_ms"] <= found["p99_ms"]
    assert one["publishes"] + one["nothing_in_flight"] == found["steps"]


def test_endurance() -> None:
    found = quick("endurance")
    assert found["publishes"] == 80
    assert abs(found["rss_growth_mb"]) < found["rss_mb"] / 2
    assert found["speed_drift"] > -1


def test_faults() -> None:
    found = quick("faults")
    assert found["identical"] == found["controlled_kills"] == 2
    assert found["ledger_balanced"] == found["live_kills"] == 2
    assert found["engine_handled"] == found["engine_faults"] == 1
    assert found["hangs"] == found["orphans"] == found["litter"] == 0


def test_live_speedup() -> None:
    found = quick("live_speedup")
    assert found["ratio"] > 0 and found["ratio_no_latency"] > 0
    assert len(found["sync_tokens"]) == len(found["live_tokens"]) == 1
    assert 0 <= found["live_lag"][0] <= found["max_lag"]


def test_overlap() -> None:
    found = quick("overlap", "--engines", "transformers")
    one = found["per_engine"]["transformers"]
    assert found["trainer_ratio"] == one["trainer_ratio"] > 0
    assert found["engine_ratio"] == one["engine_ratio"] > 0

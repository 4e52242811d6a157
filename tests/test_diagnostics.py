"""Each metric equals its definition, written out token by token, and does not care how a step was cut up."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from estr_lite.diagnostics import (
    ENTROPY_BINS,
    ENTROPY_EDGES,
    EPSILON,
    TokenDiagnostics,
    effective_sample_size,
    histogram,
    percentile,
    rollout_metrics,
    trajectory_staleness,
)
from estr_lite.objectives import Estr
from estr_lite.types import Correction, Evidence
from tests.builders import make_batch, make_evidence


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def judge(evidence: Evidence) -> Correction:
    """Some tokens kept, some rejected, some clipped."""
    return Estr(tau=0.7)(evidence)


def measure(evidence: Evidence, size: int = 100, invalid: int = 0) -> dict[str, float]:
    """The metrics of a step that is cut into micro-batches of `size` rows."""
    metric, correction = TokenDiagnostics(), judge(evidence)
    for start in range(0, len(evidence.mask), size):
        rows = slice(start, start + size)
        part = Evidence(**{f.name: getattr(evidence, f.name)[rows] for f in fields(Evidence)})
        metric.update(part, Correction(correction.weight[rows], correction.keep[rows], {}), invalid)
    return metric.compute()


def reference(evidence: Evidence) -> dict[str, float]:
    """The definitions, over the tokens that count."""
    correction, mean = judge(evidence), statistics.fmean
    where = [tuple(index) for index in evidence.mask.nonzero().tolist()]

    def column(values: Tensor) -> list[float]:
        return [float(values[index]) for index in where]

    delta, h, keep, weight = map(
        column, (evidence.logp - evidence.behavior_logp, evidence.behavior_entropy, correction.keep, correction.weight)
    )
    advantage = [float(evidence.advantage[row]) for row, _ in where]
    applied = [k * w for k, w in zip(keep, weight, strict=True)]
    z = [d / math.sqrt(spread + EPSILON) for d, spread in zip(delta, h, strict=True)]
    bins = [sum(spread >= edge for edge in ENTROPY_EDGES) for spread in h]
    found = {
        "tokens/trained": len(delta),
        "keep/fraction": mean(keep),
        "keep/clip_fraction": mean(float(w == 0) for w, k in zip(weight, keep, strict=True) if k),
        "keep/positive_advantage": mean(k for k, a in zip(keep, advantage, strict=True) if a > 0),
        "keep/negative_advantage": mean(k for k, a in zip(keep, advantage, strict=True) if a < 0),
        "ratio/ess": sum(map(math.exp, delta)) ** 2 / (len(delta) * sum(math.exp(2 * d) for d in delta)),
        "ratio/ess_applied": sum(applied) ** 2 / (len(delta) * sum(w * w for w in applied)),
        "ratio/k1": mean(-d for d in delta),
        "ratio/k3": mean(math.exp(d) - 1 - d for d in delta),
        "ratio/abs_delta_mean": mean(map(abs, delta)),
        "ratio/abs_delta_p99": sorted(map(abs, delta))[math.ceil(0.99 * len(delta)) - 1],
        "ratio/delta2": mean(d * d for d in delta),
        "ratio/delta2_kept": mean(d * d for d, k in zip(delta, keep, strict=True) if k),
        "ratio/z_variance": statistics.pvariance(z),
        "entropy/behavior": mean(h),
        "entropy/policy": mean(column(evidence.entropy)),
        "staleness/lag_mean": mean(column(evidence.lag)),
    }
    for i, label in enumerate(ENTROPY_BINS):
        inside = [(k, d * d) for k, d, b in zip(keep, delta, bins, strict=True) if b == i]
        found[f"bins/tokens_{label}"] = len(inside)
        found[f"bins/kept_{label}"] = mean(k for k, _ in inside) if inside else math.nan
        found[f"bins/delta2_{label}"] = mean(d for _, d in inside) if inside else math.nan
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_metric_is_its_definition(seed: int) -> None:
    evidence = make_evidence(rows=8, width=30, seed=seed)
    found = measure(evidence, invalid=2)
    assert found.pop("tokens/nonfinite") == 2
    expected = reference(evidence)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name


def test_the_batch_under_test_has_kept_clipped_and_rejected_tokens_and_entropies_in_every_bin_but_the_first() -> None:
    found = measure(make_evidence(rows=8, width=30))
    assert 0.1 < found["keep/fraction"] < 0.9 and 0.1 < found["keep/clip_fraction"] < 0.9
    assert all(found[f"bins/tokens_{label}"] > 0 for label in ENTROPY_BINS[1:])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_micro_batches_do_not_change_a_metric(size: int) -> None:
    evidence = make_evidence(rows=8, width=30)
    assert measure(evidence, size) == pytest.approx(measure(evidence), abs=1e-12, nan_ok=True)


def test_a_step_without_a_token_gives_nan_means_and_counts_of_0() -> None:
    evidence = make_evidence(mask=torch.zeros(3, 8, dtype=torch.bool))
    found = measure(evidence, size=2)
    counts = {"tokens/trained", "tokens/nonfinite", *(f"bins/tokens_{label}" for label in ENTROPY_BINS)}
    assert all(found[name] == 0 for name in counts)
    assert all(math.isnan(value) for name, value in found.items() if name not in counts)


def test_a_reset_forgets_the_step_before() -> None:
    metric, evidence = TokenDiagnostics(), make_evidence()
    metric.update(make_evidence(seed=1), judge(make_evidence(seed=1)), 5)
    metric.reset()
    metric.update(evidence, judge(evidence), 0)
    assert metric.compute() == pytest.approx(measure(evidence), nan_ok=True)


def test_an_entropy_on_an_edge_belongs_to_the_bin_above() -> None:
    edges = torch.tensor([[0.0, *ENTROPY_EDGES]], dtype=torch.float64)
    evidence = make_evidence(
        rows=1, width=6, logp=-edges, behavior_logp=-edges, proximal_logp=-edges,
        behavior_entropy=edges, mask=torch.ones(1, 6, dtype=torch.bool),
    )  # fmt: skip
    assert [measure(evidence)[f"bins/tokens_{label}"] for label in ENTROPY_BINS] == [1] * 6


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 3.0, 0.0], [0.5, 1.0, 1.5, 2.0]])
def test_effective_sample_size_lies_between_one_token_and_all_of_them(weights: list[float]) -> None:
    found = float(effective_sample_size(torch.tensor(weights)))
    assert found == pytest.approx(sum(weights) ** 2 / (4 * sum(w * w for w in weights)))
    assert 1 / 4 <= found <= 1


@pytest.mark.parametrize("count", [1, 2, 99, 100, 101, 1000])
def test_the_99th_percentile_is_the_smallest_value_that_99_of_100_do_not_exceed(count: int) -> None:
    values = torch.randperm(count, generator=torch.Generator().manual_seed(0)).double()
    found = float(percentile(values, 99))
    assert float((values <= found).double().mean()) >= 0.99 > float((values < found).double().mean())


# Rollouts


def test_trajectory_staleness_is_read_off_the_tags_of_real_tokens() -> None:
    intra, inter = trajectory_staleness(make_batch())  # step 5; versions 3 3 4, then 1 to 5, then 0
    assert (intra.tolist(), inter.tolist()) == ([1, 4, 0], [1, 0, 5])


def test_rollout_metrics_are_means_over_sequences() -> None:
    assert rollout_metrics(make_batch()) == pytest.approx({
        "reward/mean": 1 / 3, "reward/accuracy": 1 / 3, "reward/zero_variance_groups": 1 / 2,
        "length/mean": 3, "length/max": 5, "length/truncated": 1 / 3,
        "staleness/inter_mean": 2, "staleness/inter_max": 5,
        "staleness/intra_mean": 5 / 3, "staleness/intra_max": 4, "staleness/warmup": 1 / 3,
    })  # fmt: skip


def test_a_histogram_counts_integers_under_their_names_in_order() -> None:
    found = histogram(torch.tensor([3, 0, 3, 10, 3]))
    assert list(found.items()) == [("0", 1), ("3", 3), ("10", 1)]

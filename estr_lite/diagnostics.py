"""Metrics, derived once from (Evidence, Correction) and from the batch; objectives emit none.

Every ablation therefore logs the same names. Sums and samples accumulate over the micro-batches of a step and
over ranks, by torchmetrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from estr_lite.types import Batch, Correction, Evidence

ENTROPY_EDGES = (0.01, 0.1, 0.3, 0.6, 1.0)
"""Edges in nats of the entropy bins: [0, .01), [.01, .1), ... , [1, ∞)."""
ENTROPY_BINS = ("0-0.01", "0.01-0.1", "0.1-0.3", "0.3-0.6", "0.6-1", "1-inf")
EPSILON = 0.01
"""Floor in z = δ / √(H + ε), ESTR's."""


SUMS = (
    *("tokens", "invalid", "kept", "clipped", "k1", "k3", "delta2", "kept_delta2", "z", "z2"),
    *("behavior_entropy", "policy_entropy", "lag", "positive", "positive_kept", "negative", "negative_kept"),
)


class TokenDiagnostics(Metric):
    """Token-level metrics of one step. States are sums; log-ratios and weights are kept whole for quantiles and ESS."""

    sums: Tensor  # (len(SUMS)) float64
    bins: Tensor  # (3, len(ENTROPY_BINS)) float64: tokens, kept tokens and Σδ² of each entropy bin
    log_ratios: list[Tensor]
    applied: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name, *shape in (("sums", len(SUMS)), ("bins", 3, len(ENTROPY_BINS))):
            zeros = torch.zeros(shape, dtype=torch.float64)
            self.add_state(name, zeros, "sum")  # pyright: ignore[reportUnknownMemberType]
        for name in ("log_ratios", "applied"):
            self.add_state(name, [], "cat")  # pyright: ignore[reportUnknownMemberType]

    def update(self, evidence: Evidence, correction: Correction, invalid: int) -> None:
        """Add a micro-batch; `invalid` counts its action tokens whose behaviour was not finite."""
        mask = evidence.mask
        delta = evidence.log_ratio[mask].double()  # (N)
        spread = evidence.behavior_entropy[mask].double()
        keep, weight = correction.keep[mask], correction.weight[mask].double()
        advantage = evidence.advantage[:, None].expand_as(mask)[mask]
        squared, z = delta.square(), delta / (spread + EPSILON).sqrt()
        sums = {
            "tokens": mask,
            "invalid": delta.new_tensor(invalid),
            "kept": keep,
            "clipped": keep & (weight == 0),
            "k1": -delta,
            "k3": torch.expm1(delta.clamp(-20, 20)) - delta,
            "delta2": squared,
            "kept_delta2": squared[keep],
            "z": z,
            "z2": z.square(),
            "behavior_entropy": spread,
            "policy_entropy": evidence.entropy[mask],
            "lag": evidence.lag[mask],
            "positive": advantage > 0,
            "positive_kept": (advantage > 0) & keep,
            "negative": advantage < 0,
            "negative_kept": (advantage < 0) & keep,
        }
        self.sums += torch.stack([sums[name].sum(dtype=torch.float64) for name in SUMS])
        which = torch.bucketize(spread, spread.new_tensor(ENTROPY_EDGES), right=True)  # (N)
        self.bins.index_add_(1, which, torch.stack([torch.ones_like(delta), keep.double(), squared]))
        self.log_ratios.append(delta)
        self.applied.append(keep * weight)

    def compute(self) -> dict[str, float]:
        """Name to value; means are over the step's tokens, NaN where there was none to average."""
        total = dict(zip(SUMS, self.sums, strict=True))
        n, kept = total["tokens"], total["kept"]
        delta, applied = _whole(self.log_ratios), _whole(self.applied)
        found = {
            "tokens/trained": n,
            "tokens/nonfinite": total["invalid"],
            "keep/fraction": kept / n,
            "keep/clip_fraction": total["clipped"] / kept,
            "keep/positive_advantage": total["positive_kept"] / total["positive"],
            "keep/negative_advantage": total["negative_kept"] / total["negative"],
            "ratio/ess": effective_sample_size(delta.clamp(-20, 20).exp()),
            "ratio/ess_applied": effective_sample_size(applied),
            "ratio/k1": total["k1"] / n,
            "ratio/k3": total["k3"] / n,
            "ratio/abs_delta_mean": delta.abs().mean(),
            "ratio/abs_delta_p99": percentile(delta.abs(), 99),
            "ratio/delta2": total["delta2"] / n,
            "ratio/delta2_kept": total["kept_delta2"] / kept,
            "ratio/z_variance": total["z2"] / n - (total["z"] / n) ** 2,
            "entropy/behavior": total["behavior_entropy"] / n,
            "entropy/policy": total["policy_entropy"] / n,
            "staleness/lag_mean": total["lag"] / n,
        }
        for label, (tokens, passed, squared) in zip(ENTROPY_BINS, self.bins.T, strict=True):
            found[f"bins/tokens_{label}"] = tokens
            found[f"bins/kept_{label}"] = passed / tokens
            found[f"bins/delta2_{label}"] = squared / tokens
        return {name: float(value) for name, value in found.items()}


def percentile(values: Tensor, percent: int) -> Tensor:
    """The smallest of (N) values that `percent` % of them do not exceed, for any N; NaN without any."""
    rank = math.ceil(len(values) * percent / 100)
    return values.kthvalue(rank).values if rank else values.new_tensor(math.nan)


def effective_sample_size(weight: Tensor) -> Tensor:
    """(Σw)² / (N Σw²) of (N) weights, in (0, 1]; NaN without any weight."""
    return weight.sum().square() / (len(weight) * weight.square().sum())


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """What the step's rollouts were like: reward, length, staleness of each trajectory."""
    lengths = batch.token_mask.sum(1)  # (B)
    intra, inter = trajectory_staleness(batch)
    rewards = [batch.reward[batch.group == g] for g in set(map(int, batch.group))]
    return {
        "reward/mean": float(batch.reward.mean()),
        "reward/accuracy": float((batch.reward == 1.0).float().mean()),
        "reward/zero_variance_groups": sum(float((r == r[0]).all()) for r in rewards) / len(rewards),
        "length/mean": float(lengths.float().mean()),
        "length/max": float(lengths.max()),
        "length/truncated": float(batch.truncated.float().mean()),
        "staleness/inter_mean": float(inter.float().mean()),
        "staleness/inter_max": float(inter.max()),
        "staleness/intra_mean": float(intra.float().mean()),
        "staleness/intra_max": float(intra.max()),
        "staleness/warmup": float(batch.clamped.float().mean()),
    }


def trajectory_staleness(batch: Batch) -> tuple[Tensor, Tensor]:
    """(Δintra, Δinter), each (B), from the tokens' own tags."""
    last_token = (batch.token_mask.sum(1) - 1)[:, None]
    first, last = batch.version[:, 0], batch.version.gather(1, last_token).squeeze(1)
    return last - first, batch.step - last


def histogram(values: Tensor) -> dict[str, int]:
    """Integer value to count, as JSON wants its keys."""
    counts = Counter(map(int, values))
    return {str(value): counts[value] for value in sorted(counts)}


def _whole(parts: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(parts, Tensor):
        return parts
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.float64)

"""The one loss: every objective is a coefficient on ∇logp."""

from __future__ import annotations

import torch
from torch import Tensor

from estr_lite.types import Correction


def policy_loss(logp: Tensor, correction: Correction, advantage: Tensor, mask: Tensor, normalizer: float) -> Tensor:
    """-Σ keep · weight · A · logp / Z, whose gradient is the objective's (DESIGN.md, section 3).

    Args:
        logp: (B, T) log π_θ of the sampled tokens, with gradient.
        correction: (B, T) the objective's word on each token.
        advantage: (B).
        mask: (B, T) bool, tokens that count.
        normalizer: Z in tokens, of the whole optimizer step, so that micro-batches add up to the full batch.

    Returns:
        A scalar. Its value is a means to its gradient and says nothing of progress.
    """
    counts = mask & correction.keep
    coefficient = torch.where(counts, correction.weight * advantage[:, None], 0.0)  # (B, T)
    return -(coefficient.detach() * torch.where(counts, logp, 0.0)).sum() / max(normalizer, 1.0)

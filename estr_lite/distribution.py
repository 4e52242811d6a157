"""What the lab reads off logits: log-probabilities at the sampling temperature and the exact entropy, in nats."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from estr_lite.seeds import derive


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """(..., V) logits to (..., V) float32 log-probabilities of the distribution that is sampled."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return scaled.log_softmax(-1)


def entropy(log_probs: Tensor) -> Tensor:
    """(..., V) log-probabilities to (...) entropies -Σ p log p; a probability of 0 adds 0."""
    terms = cast(Tensor, torch.special.entr(log_probs.exp()))  # pyright: ignore[reportUnknownMemberType]
    return terms.sum(-1)


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sample each row by inverting its cumulative distribution at that row's uniform.

    One uniform a token, derived from the rollout's seed, makes a sample independent of the batch it is decoded in, and
    gives paired runs common random numbers: nearby policies draw the same token. Temperature 0 takes the argmax, with
    log-probability and entropy at temperature 1.

    Args:
        logits: (R, V).
        uniform: (R) in [0, 1), float64.
        temperature: 0 or above.

    Returns:
        token ids (R), their log-probabilities (R) and the entropies (R); the last two are NaN where a row's logits
        are not finite, and such a row's token is drawn from the uniform distribution.
    """
    log_probs = log_softmax(logits, temperature or 1.0)  # (R, V)
    broken = log_probs.isnan().any(-1)  # (R)
    usable = torch.where(broken[:, None], 0.0, log_probs) if broken.any() else log_probs
    if temperature == 0.0:
        tokens = usable.argmax(-1)
    else:
        cumulative = usable.double().exp().cumsum(-1)  # (R, V)
        point = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    logp = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, logp.masked_fill(broken, torch.nan), entropy(log_probs).masked_fill(broken, torch.nan)


def uniforms(seed: int, rollout: int, tokens: int) -> Tensor:
    """(tokens) float64 uniforms of one rollout of a ticket: position t is the same however many are asked for."""
    generator = torch.Generator().manual_seed(derive(seed, "uniform", rollout))
    return torch.rand(tokens, generator=generator, dtype=torch.float64)

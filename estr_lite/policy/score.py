"""Scoring: log π and H of given tokens. The only place where logits meet the tokens they predict (the only shift)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from estr_lite.distribution import entropy, log_softmax
from estr_lite.types import Batch

LOGITS_BUDGET = 1 << 24
"""Most logits held at once, in elements (64 MiB of float32): (B, T, V) is never whole for a real vocabulary."""


def score(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every completion token under the model as it is now.

    Returns:
        logp (B, T), with gradient where grad mode is on, and entropy (B, T), detached; both float32 in nats at the
        sampling temperature, 0 where `token_mask` is False.
    """
    ids = torch.cat([batch.prompt_ids, batch.token_ids], 1)  # (B, P+T)
    mask = torch.cat([batch.prompt_mask, batch.token_mask], 1)
    hidden = hidden_states(model, ids, mask)[:, batch.prompt_ids.shape[1] - 1 : -1]  # (B, T, D)
    logp, spread = score_rows(model, hidden[batch.token_mask], batch.token_ids[batch.token_mask], temperature)
    blank = torch.zeros(batch.token_ids.shape, device=logp.device)
    return blank.masked_scatter(batch.token_mask, logp), blank.masked_scatter(batch.token_mask, spread)


def score_sequence(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Log-probability at temperature 1 of each token of one sequence but the first: (N) ids to (N-1)."""
    with torch.no_grad():
        hidden = hidden_states(model, token_ids[None], torch.ones_like(token_ids[None], dtype=torch.bool))
        return score_rows(model, hidden[0, :-1], token_ids[1:], 1.0)[0]


def hidden_states(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, S) ids to (B, S, D) last hidden states; positions count real tokens, so padding on the left is invisible."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    decoder = model.get_decoder()
    return decoder(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)[0]


def score_rows(model: PreTrainedModel, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(N, D) hidden states and the (N) tokens they predict to logp (N) and entropy (N).

    The head is applied to slices of at most `LOGITS_BUDGET` logits, recomputed in the backward pass.
    """
    head = model.get_output_embeddings()
    assert head is not None

    def rows(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = log_softmax(head(hidden), temperature)  # (n, V)
        logp = log_probs.gather(-1, tokens[:, None]).squeeze(-1)
        with torch.no_grad():
            return logp, entropy(log_probs)

    size = max(1, LOGITS_BUDGET // model.config.get_text_config().vocab_size)
    if len(tokens) <= size:
        return rows(hidden, tokens)
    parts = [
        checkpoint(rows, h, t, use_reentrant=False) for h, t in zip(hidden.split(size), tokens.split(size), strict=True)
    ]
    logps, spreads = zip(*parts, strict=True)  # pyright: ignore[reportArgumentType]
    return torch.cat(logps), torch.cat(spreads)

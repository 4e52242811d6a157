"""The one loss has the gradient that the design promises, in float64 and by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from estr_lite.loss import policy_loss
from estr_lite.types import Correction

ROWS, WIDTH, VOCABULARY = 4, 7, 5


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MASK = draw(ROWS, WIDTH, seed=1) > -0.7
CORRECTION = Correction(draw(ROWS, WIDTH, seed=2).exp(), draw(ROWS, WIDTH, seed=3) > -0.7, {})
ADVANTAGE = draw(ROWS, seed=4)
TOKENS = draw(ROWS, WIDTH, VOCABULARY, seed=5).argmax(-1)


def scored(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, TOKENS[..., None]).squeeze(-1)  # (B, T)


def take(correction: Correction, rows: slice) -> Correction:
    return Correction(correction.weight[rows], correction.keep[rows], {})


def test_its_gradient_is_the_sum_of_keep_times_weight_times_advantage_times_the_score_over_z() -> None:
    logits = draw(ROWS, WIDTH, VOCABULARY, seed=6).requires_grad_()
    policy_loss(scored(logits), CORRECTION, ADVANTAGE, MASK, 13.0).backward()
    expected = torch.zeros_like(logits)
    for b in range(ROWS):
        for t in range(WIDTH):
            if MASK[b, t] and CORRECTION.keep[b, t]:
                of_logp = torch.eye(VOCABULARY)[TOKENS[b, t]] - logits[b, t].detach().softmax(-1)  # ∇ log softmax
                expected[b, t] = -CORRECTION.weight[b, t] * ADVANTAGE[b] * of_logp / 13.0
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_masked_or_rejected_carries_no_gradient_whatever_stands_there(garbage: float) -> None:
    counts = MASK & CORRECTION.keep
    logp = scored(draw(ROWS, WIDTH, VOCABULARY, seed=6))
    clean, dirty = logp.clone().requires_grad_(), logp.masked_fill(~counts, garbage).requires_grad_()
    spoiled = Correction(CORRECTION.weight.masked_fill(~MASK, garbage), CORRECTION.keep, {})
    losses = [
        policy_loss(clean, CORRECTION, ADVANTAGE, MASK, 13.0),
        policy_loss(dirty, spoiled, ADVANTAGE, MASK, 13.0),
    ]
    for loss in losses:
        loss.backward()
    assert torch.equal(losses[0], losses[1])
    assert clean.grad is not None and dirty.grad is not None
    assert torch.equal(clean.grad, dirty.grad)
    assert not dirty.grad[~counts].any()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_add_up_to_the_whole(size: int) -> None:
    z = float(MASK.sum())
    whole = scored(draw(ROWS, WIDTH, VOCABULARY, seed=6)).requires_grad_()
    policy_loss(whole, CORRECTION, ADVANTAGE, MASK, z).backward()
    parts = whole.detach().clone().requires_grad_()
    for start in range(0, ROWS, size):
        rows = slice(start, start + size)
        policy_loss(parts[rows], take(CORRECTION, rows), ADVANTAGE[rows], MASK[rows], z).backward()
    assert whole.grad is not None and parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=0)


def test_a_step_without_a_token_has_a_loss_and_a_gradient_of_0() -> None:
    logp = scored(draw(ROWS, WIDTH, VOCABULARY, seed=6)).requires_grad_()
    loss = policy_loss(logp, CORRECTION, ADVANTAGE, torch.zeros_like(MASK), 0.0)
    loss.backward()
    assert loss.item() == 0 and logp.grad is not None and not logp.grad.any()


def test_no_gradient_flows_into_the_correction() -> None:
    weight = CORRECTION.weight.clone().requires_grad_()
    logp = scored(draw(ROWS, WIDTH, VOCABULARY, seed=6)).requires_grad_()
    policy_loss(logp, Correction(weight, CORRECTION.keep, {}), ADVANTAGE, MASK, 13.0).backward()
    assert weight.grad is None

"""Log-probabilities, entropies and samples are those of the formulas, and randomness comes from seeds alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from estr_lite.distribution import entropy, log_softmax, sample, uniforms
from estr_lite.seeds import derive, generator

TEMPERATURES = [0.3, 0.7, 1.0, 2.5]


def draw_logits(rows: int = 6, vocabulary: int = 50, seed: int = 0) -> Tensor:
    """Random logits; a fifth of the tokens, never token 1, are impossible."""
    rng = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocabulary, generator=rng)
    impossible = torch.rand(rows, vocabulary, generator=rng) < 0.2
    return logits.masked_fill(impossible.index_fill(1, torch.tensor([1]), False), -torch.inf)


def probabilities(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in row]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_log_softmax_and_entropy_are_the_formulas_in_float64(temperature: float) -> None:
    log_probs = log_softmax(draw_logits(), temperature)
    assert log_probs.dtype == torch.float32
    for row, found, spread in zip(draw_logits().tolist(), log_probs.tolist(), entropy(log_probs).tolist(), strict=True):
        p = probabilities(row, temperature)
        assert found == pytest.approx([math.log(x) if x else -math.inf for x in p], abs=1e-5)
        assert spread == pytest.approx(-sum(x * math.log(x) for x in p if x), abs=1e-5)


@pytest.mark.parametrize("vocabulary", [2, 21, 150_000])
def test_entropy_reaches_its_bounds_and_stays_within_them(vocabulary: int) -> None:
    certain = torch.full((1, vocabulary), -torch.inf).index_fill(1, torch.tensor([1]), 0.0)
    assert entropy(log_softmax(certain, 1.0)).item() == 0.0
    assert entropy(log_softmax(torch.zeros(1, vocabulary), 1.0)).item() == pytest.approx(math.log(vocabulary), rel=1e-5)
    assert entropy(log_softmax(draw_logits(vocabulary=vocabulary), 0.7)).min() >= 0


def test_half_precision_logits_are_read_in_float32() -> None:
    logits = draw_logits().bfloat16()
    torch.testing.assert_close(log_softmax(logits, 0.7), log_softmax(logits.float(), 0.7), rtol=0, atol=0)


# Sampling


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    draws, row = 20_000, draw_logits(1, 12, seed=3)
    tokens, logp, spread = sample(row.expand(draws, -1), uniforms(0, 0, draws), temperature)
    expected = draws * torch.tensor(probabilities(row[0].tolist(), temperature))
    found = torch.bincount(tokens, minlength=12).float()
    likely = expected > 5
    statistic = ((found - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum()) - 1
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 10  # chi-square: mean n, variance 2n
    log_probs = log_softmax(row, temperature)[0]
    torch.testing.assert_close(logp, log_probs[tokens])
    torch.testing.assert_close(spread, entropy(log_probs).expand(draws))


@given(st.floats(0, 1, exclude_max=True), st.integers(0, 50))
def test_a_token_of_no_probability_is_never_drawn(uniform: float, seed: int) -> None:
    logits = draw_logits(seed=seed)
    tokens, logp, _ = sample(logits, torch.full((len(logits),), uniform, dtype=torch.float64), 1.0)
    assert logits.gather(1, tokens[:, None]).isfinite().all() and logp.isfinite().all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_possible_token(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 1.0, 0.5, 0.2, -torch.inf]])
    tokens, *_ = sample(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
    assert tokens.item() == (2 if uniform == 0 else 4)


def test_temperature_0_takes_the_most_likely_token_and_reports_temperature_1() -> None:
    logits = draw_logits()
    tokens, logp, spread = sample(logits, uniforms(0, 0, len(logits)), 0.0)
    assert torch.equal(tokens, logits.argmax(-1))
    log_probs = log_softmax(logits, 1.0)
    torch.testing.assert_close(logp, log_probs.max(-1).values)
    torch.testing.assert_close(spread, entropy(log_probs))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("fault", ["one nan", "one inf", "all nan", "nothing possible"])
def test_a_row_that_is_not_finite_says_so_and_leaves_the_others_alone(fault: str, temperature: float) -> None:
    logits, points = draw_logits(5, 16), uniforms(0, 0, 5)
    broken = logits.clone()
    match fault:
        case "one nan":
            broken[2, 4] = torch.nan
        case "one inf":
            broken[2, 4] = torch.inf
        case "all nan":
            broken[2] = torch.nan
        case _:
            broken[2] = -torch.inf
    healthy, found = sample(logits, points, temperature), sample(broken, points, temperature)
    others = torch.tensor([0, 1, 3, 4])
    assert all(torch.equal(a[others], b[others]) for a, b in zip(healthy, found, strict=True))
    assert found[1][2].isnan() and found[2][2].isnan()
    assert found[0][2] == (int(16 * points[2]) if temperature else 0)  # every token alike


def test_a_sample_does_not_depend_on_the_batch_it_is_decoded_in() -> None:
    logits, points = draw_logits(8), uniforms(0, 0, 8)
    together = sample(logits, points, 0.7)
    for row in range(8):
        alone = sample(logits[row : row + 1], points[row : row + 1], 0.7)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))


# Seeds


@given(st.integers(0, 2**63), st.integers(0, 99), st.integers(1, 64), st.integers(1, 64))
def test_position_t_has_the_same_uniform_however_many_are_asked_for(seed: int, rollout: int, a: int, b: int) -> None:
    one, other = uniforms(seed, rollout, a), uniforms(seed, rollout, b)
    assert torch.equal(one[: min(a, b)], other[: min(a, b)])
    assert one.dtype == torch.float64 and ((one >= 0) & (one < 1)).all()


def test_different_rollouts_and_different_tickets_have_different_uniforms() -> None:
    rows = [uniforms(seed, rollout, 4) for seed in range(10) for rollout in range(10)]
    assert len({tuple(row.tolist()) for row in rows}) == 100


def test_a_derived_seed_is_the_same_on_every_machine() -> None:
    assert derive(0, "rollout", 3, 1) == 8_862_366_475_676_394_405
    assert derive(0, "rollout", 3, 1) != derive(0, "rollout", 31) != derive(0, "rollout", 3, 2)
    assert all(0 <= derive(seed, "epoch") < 2**63 for seed in range(100))


def test_nothing_here_touches_the_global_generator() -> None:
    before = torch.get_rng_state()
    sample(draw_logits(), uniforms(1, 0, 6), 1.0)
    torch.rand(3, generator=generator(0, "stream"))
    assert torch.equal(torch.get_rng_state(), before)

"""Laws that every objective of the catalogue obeys, the published surrogates' gradients, and golden vectors."""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from estr_lite.objectives import (
    CATALOGUE,
    RULES,
    Clipped,
    Estr,
    EstrRule,
    Grpo,
    IcePop,
    IcePopRule,
    KeepAll,
    KPop,
    KPopRule,
    Objective,
    Product,
    Reinforce,
    Rule,
    Tis,
    ppo_clip_weight,
)
from estr_lite.objectives.kpop import binary_kl
from estr_lite.types import Correction, Evidence

INSTANCES: list[Objective] = [
    Reinforce(),
    Grpo(),
    Grpo(clip_low=1.0, clip_high=0.28),
    Clipped(),
    Clipped(IcePopRule(0.8, 1.25), clip_low=0.1, clip_high=0.1),
    Clipped(KPopRule(phi=0.05)),
    Estr(),
    Estr(tau=0.1, epsilon=0.1, clip_low=0.3, clip_high=0.3),
    IcePop(),
    IcePop(low=0.8, high=1.25, clip_low=0.1, clip_high=0.3),
    KPop(),
    KPop(phi=0.02, clip_low=0.1, clip_high=0.3),
    Tis(),
    Tis(cap=1.0, clip_low=0.1, clip_high=0.3),
    KeepAll(),
    EstrRule(tau=0.5),
    IcePopRule(),
    KPopRule(phi=0.1),
    Product((EstrRule(tau=0.5), Tis())),
]
every_objective = pytest.mark.parametrize("objective", INSTANCES, ids=repr)


def build(
    *,
    logp: Tensor,
    behavior: Tensor,
    proximal: Tensor | None = None,
    behavior_entropy: Tensor | None = None,
    advantage: Tensor | None = None,
    mask: Tensor | None = None,
) -> Evidence:
    """Evidence of (B, T) log-probs with neutral values for what a test does not care about."""
    return Evidence(
        logp=logp,
        proximal_logp=logp if proximal is None else proximal,
        behavior_logp=behavior,
        behavior_entropy=torch.ones_like(logp) if behavior_entropy is None else behavior_entropy,
        entropy=torch.ones_like(logp),
        advantage=logp.new_ones(logp.shape[0]) if advantage is None else advantage,
        lag=torch.zeros_like(logp, dtype=torch.int64),
        mask=torch.ones_like(logp, dtype=torch.bool) if mask is None else mask,
    )


def drifted(seed: int = 0, rows: int = 6, width: int = 40, spread: float = 0.6) -> Evidence:
    """Three policies a step apart from each other in float64, with ragged padding."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    behavior = -normal().abs() - 0.01  # (B, T)
    proximal = (behavior + spread * normal()).clamp_max(-1e-3)  # (B, T)
    return build(
        logp=(proximal + 0.3 * normal()).clamp_max(-1e-3),
        proximal=proximal,
        behavior=behavior,
        behavior_entropy=normal().abs(),
        advantage=normal()[:, 0],
        mask=torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator),
    )


def each(correction: Correction, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [change(value) for value in (correction.weight, correction.keep, *correction.traces.values())]


def test_the_instances_under_test_cover_the_catalogue() -> None:
    assert {type(objective) for objective in INSTANCES} - {Product} == set(CATALOGUE)
    assert set(RULES) == {kind for kind in CATALOGUE if issubclass(kind, Rule)}


@pytest.mark.parametrize("kind", CATALOGUE)
def test_every_objective_names_its_source_and_its_edges(kind: type[Objective]) -> None:
    assert kind.__doc__ and kind.reference and kind.rejected_in_z
    assert set(kind.edge.split(", ")) <= {"behavior", "update", "direct", "none"}


@pytest.mark.parametrize("kind", [*CATALOGUE, Product])
def test_field_types_resolve_in_the_module_of_the_class(kind: type[Objective]) -> None:
    """jsonargparse looks no further; where it fails it silently passes what stood on the command line."""
    hints = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    assert set(kind.__annotations__) <= set(hints)


# Laws


@every_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_every_objective_is_reinforce(objective: Objective, dtype: torch.dtype) -> None:
    logp = torch.tensor([[-1e-12, -1e-6, -0.1, -1.0, -10.0, -100.0, 0.0]], dtype=dtype)
    for advantage in (-1.0, 0.0, 1.0):
        evidence = build(
            logp=logp,
            behavior=logp,
            behavior_entropy=torch.zeros_like(logp),
            advantage=torch.tensor([advantage], dtype=dtype),
        )
        correction = objective(evidence)
        assert torch.equal(correction.weight * correction.keep, torch.ones_like(logp))


@every_objective
def test_what_stands_under_padding_is_invisible(objective: Objective) -> None:
    evidence = drifted()
    for garbage in (math.nan, math.inf, -math.inf, 7.0):
        dirty = {
            name: getattr(evidence, name).masked_fill(~evidence.mask, garbage)
            for name in ("logp", "proximal_logp", "behavior_logp", "behavior_entropy", "entropy")
        }
        clean, soiled = objective(evidence), objective(replace(evidence, **dirty))
        for a, b in zip(each(clean, lambda x: x), each(soiled, lambda x: x), strict=True):
            assert torch.equal(a[evidence.mask], b[evidence.mask])
            assert not b.isnan().any()


@every_objective
def test_appended_padding_changes_nothing(objective: Objective) -> None:
    evidence = drifted()
    names = ("logp", "proximal_logp", "behavior_logp", "behavior_entropy", "entropy", "lag", "mask")
    longer = {name: torch.nn.functional.pad(getattr(evidence, name), (0, 5)) for name in names}
    width = evidence.logp.shape[1]
    short = each(objective(evidence), lambda x: x)
    cut = each(objective(replace(evidence, **longer)), lambda x: x[:, :width])
    assert all(torch.equal(a, b) for a, b in zip(short, cut, strict=True))


@every_objective
def test_every_row_is_judged_alone(objective: Objective) -> None:
    evidence = drifted()
    for rows in (torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([2]), torch.tensor([4, 1])):
        chosen = Evidence(**{name: getattr(evidence, name)[rows] for name in Evidence.__dataclass_fields__})
        of_all = each(objective(evidence), lambda x, rows=rows: x[rows])
        of_some = each(objective(chosen), lambda x: x)
        assert all(torch.equal(a, b) for a, b in zip(of_all, of_some, strict=True))


@every_objective
def test_far_off_policy_everything_stays_finite(objective: Objective) -> None:
    logps = (0.0, -1e-9, -0.5, -20.0, -1e4, -math.inf)
    grid = torch.tensor(list(product(logps, repeat=3)))  # (216, 3) float32
    for advantage, entropy in product((-1.0, 0.0, 1.0), (0.0, 1e-30, 10.0)):
        columns = grid.T.unsqueeze(1)  # (3, 1, 216)
        correction = objective(
            build(
                logp=columns[0],
                proximal=columns[1],
                behavior=columns[2],
                behavior_entropy=torch.full_like(columns[0], entropy),
                advantage=torch.tensor([advantage]),
            )
        )
        assert correction.weight.isfinite().all()
        assert all(trace.isfinite().all() for trace in correction.traces.values())


@pytest.mark.parametrize("rule", [EstrRule(tau=1e6), IcePopRule(low=1e-6, high=1e6), KPopRule(phi=1e6)], ids=repr)
def test_a_token_that_cannot_be_scored_is_rejected(rule: Rule) -> None:
    nan, fine = torch.full((1, 1), math.nan), torch.full((1, 1), -1.0)
    for evidence in (build(logp=nan, behavior=fine), build(logp=fine, behavior=nan)):
        correction = rule(evidence)
        assert not correction.keep.any()
        assert not any(trace.isnan().any() for trace in correction.traces.values())


@every_objective
def test_evidence_is_left_as_it_was(objective: Objective) -> None:
    evidence, before = drifted(), drifted()
    objective(evidence)
    assert all(torch.equal(getattr(evidence, n), getattr(before, n)) for n in Evidence.__dataclass_fields__)


# Gradients: the surrogates as their papers write them, maximised, with autograd doing the rest

Surrogate = Callable[[Tensor, Evidence], Tensor]


def ppo(r: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.min(r * advantage, torch.clamp(r, 1 - low, 1 + high) * advantage)


def log_likelihood(logp: Tensor, e: Evidence) -> Tensor:
    return logp * e.advantage[:, None]


def direct(low: float, high: float) -> Surrogate:
    return lambda logp, e: ppo(torch.exp(logp - e.behavior_logp), e.advantage[:, None], low, high)


def update(low: float, high: float) -> Surrogate:
    return lambda logp, e: ppo(torch.exp(logp - e.proximal_logp), e.advantage[:, None], low, high)


def behavior(e: Evidence) -> Tensor:
    return torch.exp(e.proximal_logp - e.behavior_logp)


def bernoulli(p: Tensor, q: Tensor) -> Tensor:
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def near(logp: Tensor, logq: Tensor, phi: float) -> Tensor:
    p, q = logp.exp(), logq.exp()
    return (bernoulli(p, q) <= phi) & (bernoulli(q, p) <= phi)


def in_band(r: Tensor, low: float, high: float) -> Tensor:
    return (low <= r) & (r <= high)


def estr_mask(logp: Tensor, e: Evidence, tau: float, epsilon: float) -> Tensor:
    return ((logp - e.behavior_logp) ** 2 / (e.behavior_entropy + epsilon) <= tau).detach()


PUBLISHED: list[tuple[Objective, Surrogate]] = [
    (Reinforce(), log_likelihood),
    (Grpo(), direct(0.2, 0.2)),
    (Grpo(clip_low=0.1, clip_high=0.28), direct(0.1, 0.28)),
    (Clipped(), direct(0.2, 0.28)),
    (
        Clipped(IcePopRule(0.8, 1.25), clip_low=0.3, clip_high=0.3),
        lambda x, e: in_band((x - e.behavior_logp).exp().detach(), 0.8, 1.25) * direct(0.3, 0.3)(x, e),
    ),
    (
        Clipped(KPopRule(phi=0.05), clip_low=0.3, clip_high=0.3),
        lambda x, e: near(x.detach(), e.behavior_logp, 0.05) * direct(0.3, 0.3)(x, e),
    ),
    (Estr(tau=2.0), lambda x, e: estr_mask(x, e, 2.0, 0.01) * direct(0.2, 0.28)(x, e)),
    (Estr(0.1, 0.1, 0.3, 0.3), lambda x, e: estr_mask(x, e, 0.1, 0.1) * direct(0.3, 0.3)(x, e)),
    (IcePop(), lambda x, e: (behavior(e) * in_band(behavior(e), 0.5, 5.0)).detach() * update(0.2, 0.2)(x, e)),
    (
        IcePop(0.8, 1.25, 0.1, 0.3),
        lambda x, e: (behavior(e) * in_band(behavior(e), 0.8, 1.25)).detach() * update(0.1, 0.3)(x, e),
    ),
    (
        KPop(phi=0.1, clip_low=0.2, clip_high=0.28),
        lambda x, e: (behavior(e) * near(e.proximal_logp, e.behavior_logp, 0.1)).detach() * update(0.2, 0.28)(x, e),
    ),
    (Tis(), lambda x, e: torch.clamp(behavior(e), max=2.0).detach() * update(0.2, 0.2)(x, e)),
    (Tis(1.2, 0.1, 0.3), lambda x, e: torch.clamp(behavior(e), max=1.2).detach() * update(0.1, 0.3)(x, e)),
    (KeepAll(), log_likelihood),
    (EstrRule(tau=0.5), lambda x, e: estr_mask(x, e, 0.5, 0.01) * log_likelihood(x, e)),
    (
        IcePopRule(0.8, 1.25),
        lambda x, e: in_band((x - e.behavior_logp).exp().detach(), 0.8, 1.25) * log_likelihood(x, e),
    ),
    (KPopRule(phi=0.05), lambda x, e: near(x.detach(), e.behavior_logp, 0.05) * log_likelihood(x, e)),
    (
        Product((EstrRule(tau=0.5), Tis())),
        lambda x, e: estr_mask(x, e, 0.5, 0.01) * behavior(e).clamp(max=2.0).detach() * update(0.2, 0.2)(x, e),
    ),
]


def test_every_objective_of_the_catalogue_is_held_against_a_published_surrogate() -> None:
    assert {type(objective) for objective, _ in PUBLISHED} - {Product} == set(CATALOGUE)


@pytest.mark.parametrize(
    ("objective", "surrogate"), PUBLISHED, ids=lambda x: repr(x) if isinstance(x, Objective) else ""
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_equals_the_published_surrogates(objective: Objective, surrogate: Surrogate, seed: int) -> None:
    evidence = drifted(seed)
    logp = evidence.logp.clone().requires_grad_()
    surrogate(logp, evidence)[evidence.mask].sum().backward()
    correction = objective(evidence)
    stated = correction.keep * correction.weight * evidence.advantage[:, None] * evidence.mask
    torch.testing.assert_close(stated, logp.grad, rtol=1e-12, atol=1e-12)
    assert (stated != 0).any()


# Monotone: a looser parameter never lets a token go

seeds = st.integers(0, 2**31)
positive = st.floats(1e-4, 1e3)
quickly = settings(max_examples=40, deadline=None)


def shrinks(loose: Correction, tight: Correction) -> bool:
    return bool((tight.keep & ~loose.keep).any())


@quickly
@given(seeds, positive, st.floats(1.0, 100.0), st.floats(1e-4, 1.0))
def test_raising_tau_never_shrinks_what_estr_keeps(seed: int, tau: float, factor: float, epsilon: float) -> None:
    evidence = drifted(seed)
    assert not shrinks(EstrRule(tau * factor, epsilon)(evidence), EstrRule(tau, epsilon)(evidence))
    assert not shrinks(Estr(tau * factor, epsilon)(evidence), Estr(tau, epsilon)(evidence))
    assert not shrinks(EstrRule(tau, epsilon * factor)(evidence), EstrRule(tau, epsilon)(evidence))


@quickly
@given(seeds, positive, st.floats(1.0, 100.0))
def test_raising_phi_never_shrinks_what_kpop_keeps(seed: int, phi: float, factor: float) -> None:
    evidence = drifted(seed)
    assert not shrinks(KPopRule(phi * factor)(evidence), KPopRule(phi)(evidence))
    assert not shrinks(KPop(phi * factor)(evidence), KPop(phi)(evidence))


@quickly
@given(seeds, st.floats(1.0, 10.0), st.floats(1.0, 10.0), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_widening_the_band_never_shrinks_what_icepop_keeps(
    seed: int, high: float, up: float, low: float, down: float
) -> None:
    evidence = drifted(seed)
    for kind in (IcePopRule, IcePop):
        assert not shrinks(kind(low, high * up)(evidence), kind(low, high)(evidence))
        assert not shrinks(kind(low * down, high)(evidence), kind(low, high)(evidence))


@quickly
@given(seeds, st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0.0, 2.0), st.floats(1.0, 3.0))
def test_widening_clip_or_cap_never_lowers_a_weight(
    seed: int, low: float, more: float, high: float, factor: float
) -> None:
    evidence = drifted(seed)
    narrow = Grpo(low, high)(evidence).weight
    assert (Grpo(low + more, high)(evidence).weight >= narrow).all()
    assert (Grpo(low, high * factor)(evidence).weight >= narrow).all()
    assert (Tis(cap=factor + 1)(evidence).weight >= Tis(cap=factor)(evidence).weight).all()


# ESTR


@quickly
@given(seeds, st.floats(0.01, 4.0), st.floats(0.0, 5.0), st.floats(1e-3, 1.0))
def test_constant_entropy_makes_estr_a_symmetric_band(seed: int, tau: float, entropy: float, epsilon: float) -> None:
    evidence = drifted(seed)
    evidence = replace(evidence, behavior_entropy=torch.full_like(evidence.logp, entropy))
    size, edge = evidence.log_ratio.abs(), math.sqrt(tau * (entropy + epsilon))
    clear = (size - edge).abs() > 1e-12  # the two ways of writing it may round apart on the edge itself
    assert torch.equal(EstrRule(tau, epsilon)(evidence).keep[clear], (size <= edge)[clear])


def test_estr_ignores_the_sign_of_the_log_ratio_and_of_the_advantage() -> None:
    evidence = drifted()
    mirrored = replace(evidence, logp=evidence.behavior_logp, behavior_logp=evidence.logp)
    negated = replace(evidence, advantage=-evidence.advantage)
    keep = EstrRule(tau=0.3)(evidence).keep
    assert torch.equal(EstrRule(tau=0.3)(mirrored).keep, keep)
    assert torch.equal(EstrRule(tau=0.3)(negated).keep, keep)


def test_estr_allows_more_drift_where_the_sampler_was_less_sure() -> None:
    entropy = torch.linspace(0, 5, 60, dtype=torch.float64)[None]
    evidence = build(logp=torch.full_like(entropy, -1.0), behavior=torch.full_like(entropy, -2.0))
    keep = EstrRule(tau=0.5)(replace(evidence, behavior_entropy=entropy)).keep
    assert torch.equal(keep, entropy + 0.01 >= 2.0)  # δ² = 1 ≤ τ·(H + ε)


def test_estr_bounds_are_inclusive() -> None:
    evidence = build(logp=torch.tensor([[-1.0]]), behavior=torch.tensor([[-2.0]]))  # δ² = 1, H = 1
    assert EstrRule(tau=0.5, epsilon=1.0)(evidence).keep.all()
    assert not EstrRule(tau=0.499, epsilon=1.0)(evidence).keep.any()


@pytest.mark.parametrize(("tau", "epsilon", "low", "high"), [(2.0, 0.01, 0.2, 0.28), (0.1, 0.2, 0.4, 0.1)])
def test_estr_is_its_rule_under_the_shared_clip(tau: float, epsilon: float, low: float, high: float) -> None:
    evidence = drifted()
    whole = Estr(tau, epsilon, low, high)(evidence)
    for parts in (
        Clipped(EstrRule(tau, epsilon), low, high),
        Product((EstrRule(tau, epsilon), Grpo(low, high))),
        Product((Grpo(low, high), EstrRule(tau, epsilon))),
    ):
        assert all(map(torch.equal, each(whole, lambda x: x), each(parts(evidence), lambda x: x)))


def test_the_shared_clip_without_a_rule_is_grpo() -> None:
    clipped, grpo = Clipped(clip_low=0.2, clip_high=0.28)(drifted()), Grpo(clip_low=0.2, clip_high=0.28)(drifted())
    assert torch.equal(clipped.weight, grpo.weight) and clipped.keep.all()


@pytest.mark.parametrize("rule", [KeepAll(), EstrRule(0.3), IcePopRule(0.8, 1.25), KPopRule(0.05)], ids=repr)
def test_under_the_shared_clip_the_rule_alone_decides_what_is_kept(rule: Rule) -> None:
    evidence = drifted()
    alone, shared = rule(evidence), Clipped(rule)(evidence)
    assert torch.equal(alone.weight, torch.ones_like(alone.weight))
    assert torch.equal(alone.keep, shared.keep)
    assert torch.equal(shared.weight, Clipped()(evidence).weight)


# Golden vectors: tokens a to g, probabilities of the sampled token under sampler and policy

MU = [0.5, 0.01, 0.999, 0.001, 0.2, 0.2, 0.9]
PI = [0.6, 0.04, 0.8, 0.006, 0.05, 0.05, 0.95]
ENTROPY = [0.69, 2.0, 0.01, 0.01, 1.5, 1.5, 0.33]
SIGN = [1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 1.0]


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def golden(request: pytest.FixtureRequest) -> Evidence:
    """One token a row, the step's first gradient: proximal and current policy are the same."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None].to(request.param)  # (7, 1)

    def logs(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).log()[:, None].to(request.param)  # (7, 1)

    return build(logp=logs(PI), behavior=logs(MU), behavior_entropy=column(ENTROPY), advantage=column(SIGN).squeeze(1))


def kept(correction: Correction) -> str:
    return "".join(name for name, keep in zip("abcdefg", correction.keep.squeeze(1).tolist(), strict=True) if keep)


def close(found: Tensor, expected: list[float], atol: float) -> None:
    torch.testing.assert_close(
        found.squeeze(1).double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol
    )


def test_golden_estr_drops_confident_drift_and_low_entropy_off_modes(golden: Evidence) -> None:
    assert kept(EstrRule(tau=1.0, epsilon=0.01)(golden)) == kept(Estr(tau=1.0)(golden)) == "abg"
    assert kept(EstrRule(tau=1.3, epsilon=0.01)(golden)) == "abefg"


def test_golden_estr_scores(golden: Evidence) -> None:
    expected = [0.0475, 0.9561, 2.4674, 160.52, 1.2727, 1.2727, 0.0086]
    found = Estr(tau=1.0)(golden).traces["score"]
    torch.testing.assert_close(found.squeeze(1).tolist(), expected, rtol=3e-5, atol=6e-5)


def test_golden_icepop_keeps_the_confident_token_that_lost_a_fifth(golden: Evidence) -> None:
    assert kept(IcePopRule()(golden)) == kept(IcePop()(golden)) == "abcg"
    weight = IcePop()(golden).weight[torch.tensor([0, 1, 2, 6])]
    close(weight, [1.2, 4.0, 0.8008, 1.0556], 6e-5)


def test_golden_kpop_keeps_a_sixfold_ratio_at_a_tiny_probability(golden: Evidence) -> None:
    assert kept(KPopRule(phi=0.1)(golden)) == kept(KPop(phi=0.1)(golden)) == "abdg"


def test_golden_binary_divergences(golden: Evidence) -> None:
    forward = [0.0201, 0.0259, 0.8819, 0.0058, 0.0939, 0.0939, 0.0167]
    backward = [0.0204, 0.0166, 0.2166, 0.0032, 0.1398, 0.1398, 0.0207]
    close(binary_kl(golden.logp, golden.behavior_logp), forward, 6e-5)
    close(binary_kl(golden.behavior_logp, golden.logp), backward, 6e-5)
    close(KPop(phi=0.1)(golden).traces["binary_kl"], list(map(max, forward, backward)), 6e-5)


def test_golden_ppo_clip_ends_outward_gradients_only(golden: Evidence) -> None:
    correction = Grpo(clip_low=0.2, clip_high=0.28)(golden)
    close(correction.weight, [1.2, 0.0, 0.8008, 0.0, 0.0, 0.25, 1.0556], 6e-5)
    assert correction.keep.all()  # a clipped token is not a rejected one


def test_golden_tis_caps_the_weight_and_rejects_nothing(golden: Evidence) -> None:
    correction = Tis(cap=2.0)(golden)
    close(correction.weight, [1.2, 2.0, 0.801, 2.0, 0.25, 0.25, 1.056], 6e-4)
    assert correction.keep.all()


# The PPO clip and the binary divergence by themselves


@pytest.mark.parametrize(
    ("r", "advantage", "weight"),
    [
        (1.28, 1.0, 1.28),  # on the upper bound
        (1.29, 1.0, 0.0),
        (0.5, 1.0, 0.5),  # inward
        (0.8, -1.0, 0.8),  # on the lower bound
        (0.79, -1.0, 0.0),
        (3.0, -1.0, 3.0),  # inward
        (9.0, 0.0, 9.0),  # of no consequence
    ],
)
def test_ppo_clip_weight_on_each_side(r: float, advantage: float, weight: float) -> None:
    slack = 1e-12  # log and exp need not meet exactly on a bound
    log_ratio = torch.tensor([[math.log(r)]], dtype=torch.float64)
    found = ppo_clip_weight(log_ratio, torch.tensor([advantage]), 0.2 + slack, 0.28 + slack)
    torch.testing.assert_close(found.item(), weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rest", "rest_q"), [(1e-4, 1e-3), (1e-6, 1e-3), (1e-3, 1e-6), (0.2, 1e-6), (3e-7, 2e-7)])
def test_binary_kl_in_float32_is_right_near_probability_one(rest: float, rest_q: float) -> None:
    logp, logq = torch.tensor(math.log1p(-rest)), torch.tensor(math.log1p(-rest_q))  # float32
    exact = (1 - rest) * (math.log1p(-rest) - math.log1p(-rest_q)) + rest * math.log(rest / rest_q)
    assert binary_kl(logp, logq).item() == pytest.approx(exact, rel=1e-3)


def test_binary_kl_of_a_certain_token_is_finite_by_its_clamp() -> None:
    one, nearly = torch.zeros(1, 1), torch.full((1, 1), math.log(0.99))
    expected = 0.99 * math.log(0.99) + 0.01 * math.log(0.01 / 1e-8)  # D_B(.99‖1 - 1e-8)
    assert binary_kl(nearly, one).item() == pytest.approx(expected, rel=1e-5)
    assert not KPopRule(phi=0.1)(build(logp=nearly, behavior=one)).keep.any()


def test_kpop_rejects_a_token_that_the_policy_made_impossible() -> None:
    gone = torch.full((1, 1), -math.inf)
    assert not KPopRule(phi=2.0)(build(logp=gone, behavior=torch.full((1, 1), -5.0))).keep.any()


# Parameters

BAD: list[tuple[type[Objective], dict[str, float], str]] = [
    (Grpo, {"clip_low": -0.1}, "clip_low"),
    (Grpo, {"clip_low": 1.1}, "clip_low"),
    (Grpo, {"clip_high": -0.1}, "clip_high"),
    (Grpo, {"clip_high": math.inf}, "clip_high"),
    (Clipped, {"clip_low": 1.1}, "clip_low"),
    (Clipped, {"clip_high": math.nan}, "clip_high"),
    (EstrRule, {"tau": 0.0}, "tau"),
    (EstrRule, {"tau": math.nan}, "tau"),
    (EstrRule, {"tau": 1.0, "epsilon": 0.0}, "epsilon"),
    (Estr, {"tau": -1.0}, "tau"),
    (Estr, {"tau": math.inf}, "tau"),
    (Estr, {"epsilon": -0.01}, "epsilon"),
    (Estr, {"clip_low": 2.0}, "clip_low"),
    (Estr, {"clip_high": -1.0}, "clip_high"),
    (IcePopRule, {"low": 0.0}, "low"),
    (IcePopRule, {"low": 5.0, "high": 6.0}, "low"),
    (IcePopRule, {"high": 0.5}, "high"),
    (IcePop, {"low": -0.5}, "low"),
    (IcePop, {"high": 0.9}, "high"),
    (IcePop, {"clip_low": 1.5}, "clip_low"),
    (IcePop, {"clip_high": -0.2}, "clip_high"),
    (KPopRule, {"phi": 0.0}, "phi"),
    (KPop, {"phi": -0.1}, "phi"),
    (KPop, {"clip_low": -0.1}, "clip_low"),
    (KPop, {"clip_high": -0.1}, "clip_high"),
    (Tis, {"cap": 0.5}, "cap"),
    (Tis, {"clip_low": 1.5}, "clip_low"),
    (Tis, {"clip_high": math.nan}, "clip_high"),
]


@pytest.mark.parametrize(("kind", "parameters", "field"), BAD)
def test_a_bad_parameter_is_refused_by_name_and_value(
    kind: type[Objective], parameters: dict[str, float], field: str
) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.{field} must be .*, got {parameters[field]}\."):
        kind(**parameters)


def test_the_shared_clip_refuses_an_objective_that_brings_its_own_weights() -> None:
    with pytest.raises(TypeError, match=r"Clipped\.rule must be a Rule.*IcePop\("):
        Clipped(IcePop())  # pyright: ignore[reportArgumentType]


def test_a_product_refuses_factors_that_disagree_on_the_denominator() -> None:
    class Leaving(Reinforce):
        rejected_in_z = False

    for factors in ((), (Reinforce(), Leaving())):
        with pytest.raises(ValueError, match=r"Product\.factors"):
            Product(factors)

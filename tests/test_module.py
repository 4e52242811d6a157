"""The training step, on the real model, real stale rollouts and a real Lightning trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from peft import PeftModel
from torch import Tensor

import estr_lite.policy.score as scoring
from estr_lite.advantages import GroupNormalized
from estr_lite.data import collate
from estr_lite.module import NonFiniteError, Optim, PolicyModule
from estr_lite.objectives import Estr, Grpo, IcePop, KPop, Objective, Reinforce, Tis
from estr_lite.policy.adapter import Lora, attach, causal_lm, lora_parameters, read_tensors, write_tensors
from estr_lite.policy.base import Model, load_base
from estr_lite.rollout.engine import Sampling
from estr_lite.rollout.worker import grade
from estr_lite.types import Batch, Correction, Evidence, Group
from tests.lab import Lab, fit

UNCLIPPED = Optim(max_grad_norm=1e9)
STEPS = 10  # of the run that a step is part of


@pytest.fixture
def model() -> PeftModel:
    return attach(load_base(Model()), Lora(), seed=0)


@pytest.fixture(scope="module")
def stale(transformers_lab: Lab) -> list[Group]:
    """Four groups of four rollouts, sampled by versions that are not the fresh adapter."""
    return _groups(transformers_lab, [(0, 1), (4, 2)])


@pytest.fixture(scope="module")
def fresh(transformers_lab: Lab) -> list[Group]:
    """The same, sampled by the fresh adapter itself."""
    return _groups(transformers_lab, [(0, 0)])


def _groups(lab: Lab, segments: list[tuple[int, int]]) -> list[Group]:
    finished = lab.run([lab.ticket(i, segments) for i in range(4)], Sampling(max_tokens=20, rollouts=4))
    return [grade(done, lab.config.task, lab.parts.tokenizer) for done in finished]


def as_batch(groups: list[Group], step: int = 6) -> Batch:
    """The groups as a batch in which every rollout is worth something."""
    groups = [replace(group, ticket=replace(group.ticket, step=step)) for group in groups]
    batch = collate(groups, GroupNormalized())
    return replace(batch, advantage=torch.randn(len(batch), generator=torch.Generator().manual_seed(0)))


def module(model: PeftModel, objective: Objective | None = None, optim: Optim = UNCLIPPED) -> PolicyModule:
    return PolicyModule(model, objective or Estr(), optim, 1.0, STEPS)


def gradients(model: PeftModel) -> dict[str, Tensor]:
    """Of the newest optimizer step, whose clipping they have been through."""
    found = {name: p.grad for name, p in lora_parameters(model).items()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys() and found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def by_hand(model: PeftModel, batch: Batch, coefficient: Tensor, z: float) -> dict[str, Tensor]:
    """The gradient of -Σ coefficient · logp / Z, sequence by sequence, without padding; `coefficient` is (B, T)."""
    live = lora_parameters(model)
    loss = torch.zeros(())
    for row in range(len(batch)):
        prompt, tokens = batch.prompt_ids[row][batch.prompt_mask[row]], batch.token_ids[row][batch.token_mask[row]]
        logits = causal_lm(model)(input_ids=torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]  # (T)
        loss = loss - (coefficient[row, : len(tokens)] * logp).sum() / z
    return dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))


class Values(Callback):
    """What the module logged at every step."""

    def __init__(self) -> None:
        self.steps = list[dict[str, float]]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@dataclass(frozen=True)
class Watching(Objective):
    """Another objective, remembering what it saw."""

    inner: Objective = Grpo()
    seen: list[Evidence] = field(default_factory=list)

    reference = edge = "none"

    def __call__(self, evidence: Evidence) -> Correction:
        self.seen.append(evidence)
        return self.inner(evidence)


@dataclass(frozen=True)
class KeepSure(Objective):
    """Keeps the tokens above a probability, weighs them by it, and takes the others out of Z."""

    least: float = 0.5

    reference = edge = "none"
    rejected_in_z = False

    def __call__(self, evidence: Evidence) -> Correction:
        probability = evidence.logp.exp()
        return Correction(probability, probability >= self.least, {})


# one gradient, however it is computed


def test_the_step_does_not_depend_on_the_micro_batch(model: PeftModel, stale: list[Group]) -> None:
    before, after = read_tensors(model), list[dict[str, Tensor]]()
    for size in (3, 8, 64):
        write_tensors(model, before)
        fit(module(model, optim=Optim(micro_batch=size)), [as_batch(stale)])
        after.append(read_tensors(model))
    # AdamW's first step is lr * g / (|g| + 1e-8): where a gradient is next to nothing, the order of a sum shows
    assert_close(after[0], after[1], atol=1e-5)
    assert_close(after[0], after[2], atol=1e-5)
    moved = max(float((after[0][name] - before[name]).abs().max()) for name in before)
    assert moved > 1e-4


@pytest.mark.parametrize("objective", [Reinforce(), Grpo(), Estr(), IcePop(), KPop(), Tis()], ids=repr)
def test_on_policy_every_objectives_gradient_is_reinforce_by_hand(
    model: PeftModel, fresh: list[Group], objective: Objective
) -> None:
    batch = as_batch(fresh)
    advantage = batch.advantage[:, None].expand_as(batch.valid)
    expected = by_hand(model, batch, advantage, float(batch.valid.sum()))
    fit(module(model, objective), [batch])
    assert norm(expected) > 1e-3
    assert_close(gradients(model), expected, atol=1e-6)


def test_the_optimizer_step_is_adamws(model: PeftModel, stale: list[Group]) -> None:
    before = read_tensors(model)
    optim = replace(UNCLIPPED, lr=3e-4, weight_decay=0.1)
    fit(module(model, optim=optim), [as_batch(stale)])
    copies = {name: torch.nn.Parameter(tensor) for name, tensor in before.items()}
    for name, grad in gradients(model).items():
        copies[name].grad = grad
    torch.optim.AdamW(copies.values(), lr=3e-4, weight_decay=0.1).step()
    assert_close(read_tensors(model), {name: p.detach() for name, p in copies.items()}, atol=1e-7)


def test_an_objective_that_takes_rejected_tokens_out_of_z_divides_by_the_kept_ones(
    model: PeftModel, stale: list[Group]
) -> None:
    batch = as_batch(stale)
    with torch.no_grad():
        probability = scoring.score(causal_lm(model), batch, 1.0)[0].exp()
    keep = (probability >= 0.5) & batch.valid
    assert 0 < int(keep.sum()) < int(batch.valid.sum())
    expected = by_hand(model, batch, keep * probability * batch.advantage[:, None], float(keep.sum()))
    fit(module(model, KeepSure(), replace(UNCLIPPED, micro_batch=3)), [batch])
    assert_close(gradients(model), expected, atol=1e-6)


def test_a_step_that_keeps_no_token_changes_nothing(model: PeftModel, stale: list[Group]) -> None:
    before = read_tensors(model)
    fit(module(model, KeepSure(least=2.0)), [as_batch(stale)])
    assert_close(read_tensors(model), before, atol=0)


def test_gradients_are_scaled_down_to_the_largest_norm_and_the_norm_before_is_logged(
    model: PeftModel, stale: list[Group]
) -> None:
    before, limit = read_tensors(model), 0.01
    fit(module(model), [as_batch(stale)])
    free = gradients(model)
    write_tensors(model, before)
    values = Values()
    fit(module(model, optim=Optim(max_grad_norm=limit)), [as_batch(stale)], values)
    clipped = gradients(model)
    assert norm(free) > 2 * limit
    assert values.steps[0]["optim/grad_norm"] == pytest.approx(norm(free), rel=1e-5)
    assert norm(clipped) == pytest.approx(limit, rel=1e-3)
    assert_close(clipped, {name: grad * limit / norm(free) for name, grad in free.items()}, atol=1e-6)


# minibatches


def test_the_proximal_policy_is_the_one_at_the_start_of_the_step(model: PeftModel, stale: list[Group]) -> None:
    batch, watching = as_batch(stale), Watching()
    fit(module(model, watching, Optim(minibatches=2)), [batch])
    first, second = watching.seen
    assert len(first.mask) + len(second.mask) == len(batch)
    assert float(first.update_log_ratio.abs().max()) < 1e-5
    assert float(second.update_log_ratio.abs().max()) > 1e-3


def test_with_one_minibatch_the_proximal_policy_is_the_current_one(model: PeftModel, stale: list[Group]) -> None:
    watching = Watching()
    fit(module(model, watching, Optim(micro_batch=5)), [as_batch(stale)])
    assert len(watching.seen) == 4
    assert all(torch.equal(seen.logp, seen.proximal_logp) for seen in watching.seen)


def test_minibatches_are_whole_groups_and_every_token_is_trained_once(model: PeftModel, stale: list[Group]) -> None:
    batch, watching, values = as_batch(stale), Watching(), Values()
    trainer = fit(module(model, watching, Optim(minibatches=3)), [batch], values)
    assert [len(seen.mask) for seen in watching.seen] == [8, 4, 4]
    assert sum(int(seen.mask.sum()) for seen in watching.seen) == int(batch.valid.sum())
    assert values.steps[0]["tokens/trained"] == int(batch.valid.sum())
    assert trainer.global_step == 3


# numbers that are not finite


def spoil(groups: list[Group], rows: range) -> list[Group]:
    """As an engine marks tokens whose logits were not finite: here the first two of some rollouts."""

    def spoiled(group: Group) -> Group:
        rollouts = list(group.rollouts)
        for row in rows:
            logp, entropy = rollouts[row].logp.clone(), rollouts[row].entropy.clone()
            logp[:2] = entropy[:2] = torch.nan
            rollouts[row] = replace(rollouts[row], logp=logp, entropy=entropy)
        return replace(group, rollouts=tuple(rollouts))

    return [spoiled(group) for group in groups]


def test_tokens_whose_behaviour_is_not_finite_are_counted_and_masked(model: PeftModel, stale: list[Group]) -> None:
    batch, values = as_batch(spoil(stale, range(1))), Values()
    counted = torch.zeros_like(batch.valid)
    counted[::4, :2] = True
    coefficient = torch.where(counted, 0.0, batch.advantage[:, None])
    expected = by_hand(model, batch, coefficient, float(batch.valid.sum()))
    fit(module(model, Reinforce()), [batch], values)
    assert values.steps[0]["tokens/nonfinite"] == 8
    assert values.steps[0]["tokens/trained"] == int(batch.token_mask.sum()) - 8
    assert_close(gradients(model), expected, atol=1e-6)


def test_training_stops_after_so_many_such_steps_in_a_row(model: PeftModel, stale: list[Group]) -> None:
    good, bad = as_batch(stale), as_batch(spoil(stale, range(1)))
    optim = Optim(nonfinite_patience=2)
    values = Values()
    fit(module(model, optim=optim), [bad, good, bad, good], values)
    assert len(values.steps) == 4
    values = Values()
    with pytest.raises(NonFiniteError, match=r"logits were not finite for 8 of .* in each of the last 2 steps"):
        fit(module(model, optim=optim), [good, bad, bad, good], values)
    assert len(values.steps) == 2


def test_a_batch_without_a_finite_token_changes_nothing(model: PeftModel, stale: list[Group]) -> None:
    batch = as_batch(stale)
    nothing = replace(batch, valid=torch.zeros_like(batch.valid))
    before = read_tensors(model)
    fit(module(model), [nothing])
    assert_close(read_tensors(model), before, atol=0)


def test_a_policy_that_has_left_the_finite_numbers_is_stopped_before_its_weights_are_touched(
    model: PeftModel, stale: list[Group]
) -> None:
    broken = {name: t.index_fill(0, torch.tensor([0]), math.inf) for name, t in read_tensors(model).items()}
    write_tensors(model, broken)
    with pytest.raises(NonFiniteError, match=r"Step 6: the gradient norm is .*lower optim.lr \(now 0.01\)"):
        fit(module(model, optim=Optim(lr=1e-2)), [as_batch(stale)])
    assert_close(read_tensors(model), broken, atol=0)


# scoring


def scored(model: PeftModel, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies, and the gradient of a weighted sum of the former."""
    logp, entropy = scoring.score(causal_lm(model), batch, 0.7)
    model.zero_grad()
    (logp * batch.advantage[:, None]).sum().backward()
    return logp.detach(), entropy, gradients(model)


@pytest.fixture
def heads(model: PeftModel) -> Iterator[Callable[[], list[int]]]:
    """The sizes of the logits that were made since the last call."""
    sizes = list[int]()
    hook = causal_lm(model).get_output_embeddings().register_forward_hook(lambda m, i, out: sizes.append(out.numel()))

    def take() -> list[int]:
        found = sizes.copy()
        sizes.clear()
        return found

    yield take
    hook.remove()


def test_scoring_in_slices_gives_the_same_and_never_holds_more_logits_than_its_budget(
    model: PeftModel, stale: list[Group], heads: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = as_batch(stale)
    whole = scored(model, batch)
    assert len(heads()) == 1
    monkeypatch.setattr(scoring, "LOGITS_BUDGET", 500)
    sliced = scored(model, batch)
    sizes = heads()
    assert len(sizes) > 10
    assert max(sizes) <= 500
    torch.testing.assert_close(sliced[0], whole[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(sliced[1], whole[1], rtol=0, atol=1e-6)
    assert_close(sliced[2], whole[2], atol=1e-4 * norm(whole[2]))


# the run


def test_the_base_never_changes(model: PeftModel, stale: list[Group]) -> None:
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    before, adapter = {name: p.clone() for name, p in frozen.items()}, read_tensors(model)
    fit(module(model, optim=Optim(lr=1e-2, weight_decay=0.1)), [as_batch(stale)] * 3)
    assert len(frozen) > 20
    assert all(torch.equal(p, before[name]) for name, p in frozen.items())
    assert all(p.grad is None for p in frozen.values())
    assert all(not torch.equal(p, adapter[name]) for name, p in read_tensors(model).items())


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        (Optim(lr=0.01), [0.01 * (1 - step / STEPS) for step in range(4)]),
        (Optim(lr=0.01, decay="constant"), [0.01] * 4),
        (Optim(lr=0.01, decay="constant", warmup=3), [0.0025, 0.005, 0.0075, 0.01]),
        (Optim(lr=0.01, minibatches=2), [0.01 * (1 - step / STEPS) for step in range(4)]),
    ],
    ids=["linear", "constant", "warm-up", "once a step"],
)
def test_the_learning_rate_follows_its_schedule(
    model: PeftModel, stale: list[Group], optim: Optim, expected: list[float]
) -> None:
    values = Values()
    fit(module(model, optim=optim), [as_batch(stale)] * 4, values)
    assert [step["optim/lr"] for step in values.steps] == pytest.approx(expected)


def test_a_run_ends_at_a_rate_of_almost_nothing(model: PeftModel) -> None:
    (optimizer,), (schedule,) = module(model).configure_optimizers()
    rates = list[float]()
    for _ in range(STEPS):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[-1] == pytest.approx(UNCLIPPED.lr / STEPS)
    assert schedule.get_last_lr()[0] == pytest.approx(0, abs=1e-12)
    steps = [a - b for a, b in pairwise(rates)]
    assert steps == pytest.approx([UNCLIPPED.lr / STEPS] * (STEPS - 1))


def test_an_objective_sees_what_the_rollouts_know(model: PeftModel, stale: list[Group]) -> None:
    batch, watching = as_batch(stale), Watching()
    fit(module(model, watching), [batch])
    (seen,) = watching.seen
    assert set(seen.lag[seen.mask].tolist()) == {5, 4}  # step 6, versions 1 and 2
    order = batch.token_mask.sum(1).argsort(stable=True)
    torch.testing.assert_close(seen.behavior_logp, batch.behavior_logp[order])
    torch.testing.assert_close(seen.behavior_entropy, batch.behavior_entropy[order])
    torch.testing.assert_close(seen.advantage, batch.advantage[order])
    assert float(seen.log_ratio.abs().max()) > 1e-3
    assert float((seen.entropy - seen.behavior_entropy)[seen.mask].abs().max()) > 1e-3

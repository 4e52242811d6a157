"""Values are refused where they are built, and the few things that they compute are right."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch

from estr_lite.types import Batch, Correction, Evidence, Group, Prompt, Segment
from tests.builders import make_batch, make_evidence, make_group, make_rollout, make_ticket

ROLLOUT_TENSORS = ("token_ids", "logp", "entropy", "version", "action")
PER_TOKEN = ("token_mask", "action_mask", "valid", "behavior_logp", "behavior_entropy", "version")
PER_SEQUENCE = ("advantage", "reward", "truncated", "clamped", "group")


def segments(*pairs: tuple[int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(start, version) for start, version in pairs)


def correction(**changes: Any) -> Correction:
    values: dict[str, Any] = {"weight": torch.full((2, 3), 2.0), "keep": torch.ones(2, 3, dtype=torch.bool)}
    return Correction(**{**values, "traces": {}, **changes})


def test_a_prompt_without_tokens_is_refused_by_its_uid() -> None:
    with pytest.raises(ValueError, match="Prompt 'sum:7' has no tokens"):
        Prompt("sum:7", (), "1")


# Tickets


@pytest.mark.parametrize("plan", [segments((0, 0)), segments((0, 5)), segments((0, 2), (3, 2), (9, 4))], ids=repr)
def test_a_ticket_takes_rising_starts_and_versions_up_to_its_step(plan: tuple[Segment, ...]) -> None:
    assert make_ticket(step=5, segments=plan).segments == plan


@pytest.mark.parametrize("plan", [(), segments((1, 0)), segments((0, 0), (0, 1)), segments((0, 0), (4, 1), (3, 2))])
def test_a_ticket_refuses_starts_that_do_not_rise_from_0(plan: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match=r"Ticket\.segments must start at token 0 and rise"):
        make_ticket(segments=plan)


@pytest.mark.parametrize("plan", [segments((0, 3), (2, 2)), segments((0, -1))])
def test_a_ticket_refuses_versions_that_fall_or_are_below_0(plan: tuple[Segment, ...]) -> None:
    with pytest.raises(ValueError, match=r"Ticket\.segments of step 5: versions must be 0 or above, not falling"):
        make_ticket(step=5, segments=plan)


# Rollouts and groups


@pytest.mark.parametrize("name", ROLLOUT_TENSORS[1:])
def test_a_rollout_refuses_a_field_of_another_length(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Rollout\.{name} must have shape \(4,\), got \(3,\)"):
        make_rollout(4, **{name: getattr(make_rollout(3), name)})


def test_a_rollout_refuses_a_matrix_no_tokens_and_an_action_that_is_no_truth_value() -> None:
    with pytest.raises(ValueError, match=r"Rollout\.token_ids must have shape \(4,\), got \(1, 4\)"):
        make_rollout(**{name: getattr(make_rollout(4), name)[None] for name in ROLLOUT_TENSORS})
    with pytest.raises(ValueError, match="Rollout has no tokens"):
        make_rollout(0)
    with pytest.raises(TypeError, match=r"Rollout\.action must be bool, got torch\.int64"):
        make_rollout(4, action=torch.ones(4, dtype=torch.int64))


def test_a_group_refuses_to_be_empty_and_a_reward_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="Group of step 5, slot 2 has no rollouts"):
        Group(make_ticket(5, slot=2), ())
    for reward in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="Group of step 5, slot 2 has a reward that is not finite"):
            make_group(5, slot=2, rollouts=(make_rollout(), make_rollout(reward=reward)))


# Batches


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_SEQUENCE, "prompt_mask"])
def test_a_batch_refuses_a_field_of_another_shape(name: str) -> None:
    value = getattr(make_batch(), name)
    for wrong in (value[:2], value[..., :2]):
        with pytest.raises(ValueError, match=rf"Batch\.{name} must have shape"):
            make_batch(**{name: wrong})


@pytest.mark.parametrize("name", ["token_ids", "prompt_ids"])
def test_a_batch_refuses_ids_that_are_no_matrix(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Batch\.{name} must have two dimensions, got shape \(3,\)"):
        make_batch(**{name: torch.arange(3)})


@pytest.mark.parametrize("index", [slice(0, 2), torch.tensor([2, 0]), torch.tensor([1]), slice(0, 3)], ids=str)
def test_rows_trims_only_padding_that_no_chosen_sequence_needs(index: slice | torch.Tensor) -> None:
    batch, part = make_batch(), make_batch().rows(index)
    order = torch.arange(3)[index]
    assert part.prompt_mask[:, 0].any() and part.token_mask[:, -1].any()  # no column is padding alone
    for row, source in enumerate(order.tolist()):
        for ids, mask in (("prompt_ids", "prompt_mask"), ("token_ids", "token_mask"), ("version", "token_mask")):
            kept = getattr(part, ids)[row][getattr(part, mask)[row]]
            assert torch.equal(kept, getattr(batch, ids)[source][getattr(batch, mask)[source]])
    for name in PER_SEQUENCE:
        assert torch.equal(getattr(part, name), getattr(batch, name)[order])
    assert (len(part), part.step) == (len(order), batch.step)


def test_to_moves_every_tensor_and_keeps_the_step() -> None:
    moved = make_batch().to("meta")
    tensors = [f.name for f in fields(Batch) if f.name != "step"]
    assert {getattr(moved, name).device.type for name in tensors} == {"meta"} and moved.step == 5
    same = make_batch().to("cpu")
    assert torch.equal(same.token_ids, make_batch().token_ids)


# Evidence and corrections


@pytest.mark.parametrize("name", [f.name for f in fields(Evidence) if f.name != "logp"])
def test_evidence_refuses_a_field_of_another_shape(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Evidence\.{name} must have shape"):
        make_evidence(**{name: getattr(make_evidence(rows=2), name)})


def test_evidence_refuses_a_vector_and_a_mask_that_is_no_truth_value() -> None:
    flat = {f.name: torch.zeros(4) for f in fields(Evidence)}
    with pytest.raises(ValueError, match=r"Evidence\.logp must have two dimensions"):
        Evidence(**flat)
    with pytest.raises(TypeError, match=r"Evidence\.mask must be bool, got torch\.int64"):
        make_evidence(mask=make_evidence().mask.long())


@pytest.mark.parametrize("name", ["logp", "proximal_logp", "behavior_entropy", "entropy", "advantage"])
def test_evidence_must_be_detached(name: str) -> None:
    with pytest.raises(ValueError, match="Evidence must be detached"):
        make_evidence(**{name: getattr(make_evidence(), name).requires_grad_()})


def test_the_direct_edge_is_the_sum_of_the_two_others_and_all_are_0_under_the_mask() -> None:
    evidence = make_evidence()
    edges = evidence.log_ratio, evidence.behavior_log_ratio, evidence.update_log_ratio
    torch.testing.assert_close(edges[0], edges[1] + edges[2])
    torch.testing.assert_close(edges[0][evidence.mask], (evidence.logp - evidence.behavior_logp)[evidence.mask])
    assert all(not edge[~evidence.mask].any() for edge in edges)  # where NaN stands


def test_corrections_multiply_weights_and_keeps_and_collect_traces() -> None:
    keep = torch.tensor([[True, False, True], [False, True, True]])
    one = correction(keep=keep, traces={"score": torch.zeros(2, 3)})
    other = correction(weight=torch.full((2, 3), 3.0), keep=~keep | keep.flip(1), traces={"kl": torch.ones(2, 3)})
    both = one * other
    assert torch.equal(both.weight, torch.full((2, 3), 6.0))
    assert torch.equal(both.keep, one.keep & other.keep)
    assert set(both.traces) == {"score", "kl"}


def test_a_correction_refuses_another_shape_anywhere_and_a_keep_that_is_no_truth_value() -> None:
    with pytest.raises(ValueError, match=r"Correction\.keep must have shape \(2, 3\), got \(2, 2\)"):
        correction(keep=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"Correction\.traces\['score'\] must have shape \(2, 3\), got \(3,\)"):
        correction(traces={"score": torch.zeros(3)})
    with pytest.raises(TypeError, match=r"Correction\.keep must be bool"):
        correction(keep=torch.ones(2, 3))


def test_values_are_frozen() -> None:
    for value, name in ((make_ticket(), "step"), (make_rollout(), "reward"), (make_batch(), "step")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, 1)

"""Collation pads once and knows padding by position; the stream waits, has a length and ends when the run does."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from estr_lite.advantages import GroupCentered, GroupNormalized
from estr_lite.data import Stream, collate
from estr_lite.rollout.mailbox import Mailbox, RolloutError
from estr_lite.types import Batch, Group
from tests.builders import make_group, make_rollout, make_ticket

EOS = 0  # and the padding too, as in many real models


def two_groups() -> list[Group]:
    """Prompts of 1 and 3 tokens; completions of 3, 1, 2 and 4 tokens that hold the padding id, and end with it."""
    rows = [[5, EOS, EOS], [EOS], [6, EOS], [EOS, 7, 8, EOS]]
    rollouts = [
        make_rollout(len(ids), token_ids=torch.tensor(ids), reward=float(i), finish="length" if i == 2 else "stop")
        for i, ids in enumerate(rows)
    ]
    return [
        Group(make_ticket(5, 0, prompt=(EOS,), clamped=True), tuple(rollouts[:2])),
        Group(make_ticket(5, 1, prompt=(3, EOS, 4)), tuple(rollouts[2:])),
    ]


def collated() -> Batch:
    return collate(two_groups(), GroupCentered())


def test_prompts_are_padded_left_and_completions_right() -> None:
    batch = collated()
    assert batch.prompt_ids.tolist() == [[0, 0, EOS], [0, 0, EOS], [3, EOS, 4], [3, EOS, 4]]
    assert batch.prompt_mask.int().tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]]
    assert batch.token_ids.tolist() == [[5, 0, 0, 0], [0, 0, 0, 0], [6, 0, 0, 0], [0, 7, 8, 0]]
    assert batch.token_mask.int().tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


def test_the_masks_follow_positions_also_where_the_padding_id_is_a_real_token() -> None:
    batch, rows = collated(), [rollout for group in two_groups() for rollout in group.rollouts]
    assert batch.token_mask.sum(1).tolist() == [len(rollout) for rollout in rows]
    assert torch.equal(batch.action_mask, batch.token_mask) and torch.equal(batch.valid, batch.token_mask)


def test_every_token_keeps_what_its_sampler_knew_of_it() -> None:
    batch, rows = collated(), [rollout for group in two_groups() for rollout in group.rollouts]
    for row, rollout in enumerate(rows):
        n = len(rollout)
        assert torch.equal(batch.behavior_logp[row, :n], rollout.logp)
        assert torch.equal(batch.behavior_entropy[row, :n], rollout.entropy)
        assert torch.equal(batch.version[row, :n], rollout.version)
        assert not batch.behavior_logp[row, n:].any() and not batch.version[row, n:].any()


def test_what_belongs_to_sequences_and_groups_is_in_their_order() -> None:
    batch = collated()
    assert batch.step == 5 and len(batch) == 4
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.reward.tolist() == [0, 1, 2, 3]
    assert batch.advantage.tolist() == [-0.5, 0.5, -0.5, 0.5]
    assert batch.truncated.tolist() == [False, False, True, False]
    assert batch.clamped.tolist() == [True, True, False, False]


@pytest.mark.parametrize("field", ["logp", "entropy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_behaviour_that_is_not_finite_is_zeroed_and_marked_invalid(field: str, value: float) -> None:
    ok = make_rollout(3)
    broken = make_rollout(3, **{field: getattr(ok, field).index_fill(0, torch.tensor([1]), value)})
    batch = collate([make_group(rollouts=(ok, broken))], GroupNormalized())
    assert batch.valid.tolist() == [[True, True, True], [True, False, True]]
    assert batch.action_mask.all()
    assert batch.behavior_logp.isfinite().all() and batch.behavior_entropy.isfinite().all()
    assert batch.behavior_logp[1, 1] == batch.behavior_entropy[1, 1] == 0


def test_a_token_that_a_tool_wrote_stands_in_the_sequence_and_counts_for_nothing() -> None:
    tool = make_rollout(3, action=torch.tensor([True, False, True]), logp=torch.tensor([-0.1, math.nan, -0.1]))
    batch = collate([make_group(rollouts=(tool, make_rollout(3)))], GroupNormalized())
    assert batch.token_mask[0].all()
    assert batch.action_mask[0].tolist() == batch.valid[0].tolist() == [True, False, True]


def test_groups_of_another_step_or_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups of one step and one size, got steps \{5, 6\}"):
        collate([make_group(5), make_group(6)], GroupCentered())
    with pytest.raises(ValueError, match=r"one step and one size, .* sizes \{2, 3\}"):
        collate([make_group(lengths=(1, 2)), make_group(slot=1, lengths=(1, 2, 3))], GroupCentered())


# The stream


def test_a_token_of_a_version_that_came_after_its_step_is_refused() -> None:
    rollout = make_rollout(2, version=torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="batch of step 5 holds tokens of version 6"):
        collate([Group(make_ticket(5), (rollout, rollout))], GroupCentered())


def test_a_stream_has_a_length_and_gives_one_batch_a_step_in_order() -> None:
    mailbox = Mailbox()
    for step in (7, 5, 6):
        mailbox.put(make_group(step))
    stream = Stream(range(5, 8), lambda step: mailbox.take(step, 1), GroupNormalized())
    assert len(stream) == 3
    seen = [(batch.step, stream.groups[0].ticket.step) for batch in stream]
    assert seen == [(5, 5), (6, 6), (7, 7)]


def test_a_stream_takes_no_step_before_it_is_asked_for_it() -> None:
    """Lightning must not prefetch: at zero lag the next step's groups need this step's adapter."""
    asked = list[int]()

    def take(step: int) -> list[Group]:
        asked.append(step)
        return [make_group(step)]

    batches = iter(Stream(range(5, 8), take, GroupNormalized()))
    assert asked == []
    next(batches)
    assert asked == [5]


def test_a_stream_ends_early_when_the_run_is_stopped() -> None:
    mailbox = Mailbox()
    mailbox.put(make_group(5))
    mailbox.stop()
    assert [b.step for b in Stream(range(5, 9), lambda step: mailbox.take(step, 1), GroupNormalized())] == [5]


def test_a_stream_passes_on_the_failure_of_the_worker() -> None:
    mailbox = Mailbox()
    mailbox.fail(RuntimeError("no adapter"))
    with pytest.raises(RolloutError, match="no adapter"):
        next(iter(Stream(range(5), lambda step: mailbox.take(step, 1), GroupNormalized())))


def test_a_stream_counts_the_seconds_that_the_trainer_waits_for_data() -> None:
    mailbox = Mailbox()
    stream = Stream(range(5, 6), lambda step: mailbox.take(step, 1), GroupNormalized())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (time.sleep(0.2), mailbox.put(make_group(5))))
        list(stream)
    assert 0.1 < stream.waited < 5

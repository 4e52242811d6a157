"""Collation: groups of one step to a batch, padded once; and the stream that feeds it to Lightning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from estr_lite.advantages import Advantage
from estr_lite.rollout.mailbox import Stopped
from estr_lite.types import Batch, Group


def collate(groups: Sequence[Group], advantage: Advantage) -> Batch:
    """The step's groups, by slot, as one batch; behaviour that is not finite is zeroed and marked invalid.

    Raises:
        ValueError: if the groups are of different steps or sizes, or of versions that came after their step.
    """
    steps, sizes = {g.ticket.step for g in groups}, {len(g.rollouts) for g in groups}
    if len(steps) != 1 or len(sizes) != 1:
        raise ValueError(f"A batch holds groups of one step and one size, got steps {steps} and sizes {sizes}.")
    step, newest = next(iter(steps)), max(int(r.version.max()) for g in groups for r in g.rollouts)
    if newest > step:
        raise ValueError(f"The batch of step {step} holds tokens of version {newest}, which did not exist yet.")
    rewards = torch.tensor([[r.reward for r in g.rollouts] for g in groups])  # (N, G)
    rows = [r for g in groups for r in g.rollouts]
    prompts = [torch.tensor(g.ticket.prompt.token_ids) for g in groups for _ in g.rollouts]
    prompt_ids, prompt_mask = _pad(prompts, left=True)
    token_ids, token_mask = _pad([r.token_ids for r in rows])
    action, logp, entropy = (_pad([getattr(r, name) for r in rows])[0] for name in ("action", "logp", "entropy"))
    finite = logp.isfinite() & entropy.isfinite()
    return Batch(
        step=step,
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        token_ids=token_ids,
        token_mask=token_mask,
        action_mask=action,
        valid=action & finite,
        behavior_logp=logp.where(finite, 0.0),
        behavior_entropy=entropy.where(finite, 0.0),
        version=_pad([r.version for r in rows])[0],
        advantage=advantage(rewards).flatten(),
        reward=rewards.flatten(),
        truncated=torch.tensor([r.finish == "length" for r in rows]),
        clamped=torch.tensor([g.ticket.clamped for g in groups for _ in g.rollouts]),
        group=torch.arange(len(groups)).repeat_interleave(sizes.pop()),
    )


def _pad(rows: Sequence[Tensor], left: bool = False) -> tuple[Tensor, Tensor]:
    """The only padding: (B, longest) values, zero where nothing stands, and the mask of where something does."""
    side = "left" if left else "right"
    values = pad_sequence(list(rows), batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones(len(r), dtype=torch.bool) for r in rows], batch_first=True, padding_side=side)
    return values, mask


class Stream:
    """One batch a training step, waiting for each; it ends early when the run is stopped.

    It has a length, or Lightning would prefetch a batch and zero lag would deadlock.
    `waited` counts the seconds the trainer stood idle for data.

    Args:
        steps: the training steps.
        take: waits for a step's groups; Stopped ends the stream.
        advantage: makes advantages of their rewards.
        popped: told the groups of each step as they come.
    """

    def __init__(
        self,
        steps: range,
        take: Callable[[int], list[Group]],
        advantage: Advantage,
        popped: Callable[[int, list[Group]], None] = lambda step, groups: None,
    ) -> None:
        self._steps, self._take, self._advantage, self._popped = steps, take, advantage, popped
        self.groups: list[Group] = []
        """The groups of the newest batch."""
        self.waited = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        for step in self._steps:
            started = time.monotonic()
            try:
                self.groups = self._take(step)
            except Stopped:
                return
            self.waited += time.monotonic() - started
            self._popped(step, self.groups)
            yield collate(self.groups, self._advantage)

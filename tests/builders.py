"""Small valid values for tests, each with the one thing changed that a test is about."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from estr_lite.types import Batch, Evidence, Group, Prompt, Rollout, Segment, Ticket


class Characters:
    """A tokenizer without a vocabulary: one token a character."""

    chat_template: str | None = None

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, conversation: list[dict[str, str]], /, **options: object) -> list[int]:
        return self.encode(f"<{conversation[0]['content']}>", add_special_tokens=False)

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def make_ticket(step: int = 5, slot: int = 0, prompt: tuple[int, ...] = (7, 8, 9), **changes: Any) -> Ticket:
    fields: dict[str, Any] = {"segments": (Segment(0, 3), Segment(2, 4)), "seed": 11, "clamped": False}
    return Ticket(step, slot, Prompt(f"p{slot}", prompt, "1"), **{**fields, **changes})


def make_rollout(length: int = 4, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "token_ids": torch.arange(1, length + 1),
        "logp": -torch.arange(1, length + 1) / 10,
        "entropy": torch.arange(1, length + 1) / 20,
        "version": torch.tensor([3, 3, *[4] * length])[:length],
        "action": torch.ones(length, dtype=torch.bool),
        "finish": "stop",
        "reward": 1.0,
    }
    return Rollout(**{**fields, **changes})


def make_group(step: int = 5, slot: int = 0, lengths: tuple[int, ...] = (4, 2), **changes: Any) -> Group:
    rollouts = tuple(make_rollout(length, reward=float(i)) for i, length in enumerate(lengths))
    return Group(make_ticket(step, slot), **{"rollouts": rollouts, **changes})


def make_batch(**changes: Any) -> Batch:
    """Three sequences: prompts of 1, 2 and 4 tokens, completions of 3, 5 and 1."""
    prompt_mask = torch.arange(4) >= 4 - torch.tensor([[1], [2], [4]])  # (3, 4), padded left
    mask = torch.arange(5) < torch.tensor([[3], [5], [1]])  # (3, 5), padded right
    fields: dict[str, Any] = {
        "step": 5,
        "prompt_ids": torch.arange(12).view(3, 4) * prompt_mask,
        "prompt_mask": prompt_mask,
        "token_ids": torch.arange(15).view(3, 5) * mask,
        "token_mask": mask,
        "action_mask": mask,
        "valid": mask,
        "behavior_logp": -torch.rand(3, 5) * mask,
        "behavior_entropy": torch.rand(3, 5) * mask,
        "version": torch.tensor([[3, 3, 4, 0, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]]),
        "advantage": torch.tensor([1.0, -1.0, 0.0]),
        "reward": torch.tensor([1.0, 0.0, 0.0]),
        "truncated": torch.tensor([False, True, False]),
        "clamped": torch.tensor([False, False, True]),
        "group": torch.tensor([0, 0, 1]),
    }
    return Batch(**{**fields, **changes})


def make_evidence(rows: int = 3, width: int = 8, seed: int = 0, **changes: Any) -> Evidence:
    """Random evidence in float64; about a quarter of the tokens are masked, and NaN stands there."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(rows, width, generator=generator, dtype=torch.float64)

    mask = draw() < 0.75
    fields: dict[str, Any] = {
        name: (-3 * draw()).masked_fill(~mask, math.nan) for name in ("logp", "proximal_logp", "behavior_logp")
    }
    fields |= {"behavior_entropy": 1.5 * draw(), "entropy": 1.5 * draw(), "advantage": 2 * draw()[:, 0] - 1}
    fields |= {"lag": (6 * draw()).long(), "mask": mask}
    return Evidence(**{**fields, **changes})

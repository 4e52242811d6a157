"""The values that flow through the lab: frozen, without optional fields, shapes checked where they are built.

Words (DESIGN.md, section 2): *version* v is the number of optimizer steps an adapter has had; *step* s is the training
step that consumes a batch, its target version is s; the *lag* of a token is s - v. Per trajectory,
Δintra = v_last - v_first and Δinter = s - v_last (arXiv 2607.22186).

Shapes: `B` sequences, `G` rollouts a prompt, `P` padded prompt, `T` padded completion, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question of a task: its tokens as the model sees them and what the grader needs to judge an answer."""

    uid: str
    token_ids: tuple[int, ...]
    reference: str

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"Prompt {self.uid!r} has no tokens; a prompt needs at least one.")


@dataclass(frozen=True, order=True)
class Segment:
    """From completion token `start` on, adapter `version` samples."""

    start: int
    version: int


@dataclass(frozen=True)
class Ticket:
    """All that is random about one group, fixed before anything runs; live, `segments` is what came about.

    `clamped` marks a warm-up ticket: its law asked for a version below 0 and got 0.
    """

    step: int
    slot: int
    prompt: Prompt
    segments: tuple[Segment, ...]
    seed: int
    clamped: bool

    def __post_init__(self) -> None:
        starts = [segment.start for segment in self.segments]
        versions = [segment.version for segment in self.segments]
        if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
            raise ValueError(f"Ticket.segments must start at token 0 and rise, got starts {starts}.")
        if versions != sorted(versions) or versions[0] < 0:
            raise ValueError(
                f"Ticket.segments of step {self.step}: versions must be 0 or above, not falling: {versions}."
            )


@dataclass(frozen=True, eq=False)
class Rollout:
    """One graded completion with what its sampler knew of every token, all of shape (T_i).

    `logp` is log μ of the sampled token at the sampling temperature and `entropy` is H(μ), both in nats over the full
    vocabulary; both are NaN where the engine's logits were not finite. `version` is the adapter that really sampled
    the token. `action` is False where a tool, not the policy, wrote it. `reward` is NaN until it is graded.
    """

    token_ids: Tensor  # (T_i) int64
    logp: Tensor  # (T_i) float32
    entropy: Tensor  # (T_i) float32
    version: Tensor  # (T_i) int64
    action: Tensor  # (T_i) bool
    finish: Finish
    reward: float

    def __post_init__(self) -> None:
        length = self.token_ids.numel()
        if length == 0:
            raise ValueError("Rollout has no tokens; a completion has at least one.")
        _expect(self, (length,), ("token_ids", "logp", "entropy", "version", "action"))
        if self.action.dtype != torch.bool:
            raise TypeError(f"Rollout.action must be bool, got {self.action.dtype}.")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class Group:
    """The G rollouts of one ticket."""

    ticket: Ticket
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ValueError(f"Group of step {self.ticket.step}, slot {self.ticket.slot} has no rollouts.")
        if not all(math.isfinite(rollout.reward) for rollout in self.rollouts):
            raise ValueError(
                f"Group of step {self.ticket.step}, slot {self.ticket.slot} has a reward that is not finite."
            )


@dataclass(frozen=True, eq=False)
class Batch:
    """What one training step consumes; prompts are padded left, completions right.

    Padding is known by position (the masks), never by token id: pad and eos may be the same token. `valid` is False
    for action tokens whose behaviour was not finite; they are in `action_mask` but carry no gradient.
    """

    step: int
    prompt_ids: Tensor  # (B, P) int64
    prompt_mask: Tensor  # (B, P) bool
    token_ids: Tensor  # (B, T) int64
    token_mask: Tensor  # (B, T) bool, a token stands here
    action_mask: Tensor  # (B, T) bool, and the policy wrote it
    valid: Tensor  # (B, T) bool, and its sampler's logits were finite
    behavior_logp: Tensor  # (B, T) float32
    behavior_entropy: Tensor  # (B, T) float32
    version: Tensor  # (B, T) int64
    advantage: Tensor  # (B) float32
    reward: Tensor  # (B) float32
    truncated: Tensor  # (B) bool, ended by length
    clamped: Tensor  # (B) bool, the ticket was a warm-up ticket
    group: Tensor  # (B) int64, which ticket's

    def __post_init__(self) -> None:
        shape = _matrix(self, "token_ids")
        _expect(self, (shape[0], _matrix(self, "prompt_ids")[1]), ("prompt_ids", "prompt_mask"))
        per_token = ("token_mask", "action_mask", "valid", "behavior_logp", "behavior_entropy", "version")
        _expect(self, shape, per_token)
        _expect(self, shape[:1], ("advantage", "reward", "truncated", "clamped", "group"))

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device (Lightning calls this)."""
        return replace(self, **{name: value.to(device) for name, value in self._tensors().items()})

    def rows(self, index: Tensor | slice) -> Batch:
        """The batch of the chosen sequences, with padding that none of them needs cut away."""
        chosen = {name: value[index] for name, value in self._tensors().items()}
        prompt = int(chosen["prompt_mask"].sum(1).max())
        length = int(chosen["token_mask"].sum(1).max())
        for name, value in chosen.items():
            if value.dim() == 2:
                start = value.shape[1] - prompt
                chosen[name] = value[:, start:] if name.startswith("prompt") else value[:, :length]
        return replace(self, **chosen)

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step"}


@dataclass(frozen=True, eq=False)
class Evidence:
    """All that an objective may see, detached; every field of shape (B, T) but `advantage`, which is (B).

    The three edges of the policy triangle follow: behaviour edge B = exp(proximal - behavior), update edge
    U = exp(logp - proximal), direct edge E = exp(logp - behavior) = B · U.
    """

    logp: Tensor  # (B, T) log π_θ of the sampled token, now
    proximal_logp: Tensor  # (B, T) the same under the policy at the start of the step
    behavior_logp: Tensor  # (B, T) log μ, the sampler's
    behavior_entropy: Tensor  # (B, T) H(μ) in nats, full vocabulary
    entropy: Tensor  # (B, T) H(π_θ)
    advantage: Tensor  # (B)
    lag: Tensor  # (B, T) step minus the token's version
    mask: Tensor  # (B, T) bool, tokens that count

    def __post_init__(self) -> None:
        shape = _matrix(self, "logp")
        per_token = ("logp", "proximal_logp", "behavior_logp", "behavior_entropy", "entropy", "lag", "mask")
        _expect(self, shape, per_token)
        _expect(self, shape[:1], ("advantage",))
        if self.mask.dtype != torch.bool:
            raise TypeError(f"Evidence.mask must be bool, got {self.mask.dtype}.")
        if any(getattr(self, f.name).requires_grad for f in fields(self)):
            raise ValueError("Evidence must be detached: an objective returns coefficients, autograd does the rest.")

    @property
    def log_ratio(self) -> Tensor:
        """δ = log π_θ - log μ, the direct edge, (B, T); 0 where `mask` is False."""
        return self._edge(self.logp, self.behavior_logp)

    @property
    def behavior_log_ratio(self) -> Tensor:
        """log π_proximal - log μ, the behaviour edge, (B, T); 0 where `mask` is False."""
        return self._edge(self.proximal_logp, self.behavior_logp)

    @property
    def update_log_ratio(self) -> Tensor:
        """log π_θ - log π_proximal, the update edge, (B, T); 0 where `mask` is False."""
        return self._edge(self.logp, self.proximal_logp)

    def _edge(self, above: Tensor, below: Tensor) -> Tensor:
        return torch.where(self.mask, above - below, 0.0)


@dataclass(frozen=True, eq=False)
class Correction:
    """What an objective says of every token: gradient = Σ keep · weight · A · ∇logp / Z.

    A surrogate f(r)·A has weight f′(r)·r. `traces` are named (B, T) tensors worth looking at, such as ESTR's score.
    """

    weight: Tensor  # (B, T) float
    keep: Tensor  # (B, T) bool
    traces: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        shape = _matrix(self, "weight")
        _expect(self, shape, ("keep",))
        if self.keep.dtype != torch.bool:
            raise TypeError(f"Correction.keep must be bool, got {self.keep.dtype}.")
        for name, trace in self.traces.items():
            if tuple(trace.shape) != shape:
                raise ValueError(f"Correction.traces[{name!r}] must have shape {shape}, got {tuple(trace.shape)}.")

    def __mul__(self, other: Correction) -> Correction:
        """Weights multiply, keeps and."""
        return Correction(self.weight * other.weight, self.keep & other.keep, {**self.traces, **other.traces})


def _matrix(owner: object, name: str) -> tuple[int, ...]:
    found = tuple(getattr(owner, name).shape)
    if len(found) != 2:
        raise ValueError(f"{type(owner).__name__}.{name} must have two dimensions, got shape {found}.")
    return found


def _expect(owner: object, shape: tuple[int, ...], names: Sequence[str]) -> None:
    for name in names:
        found = tuple(getattr(owner, name).shape)
        if found != shape:
            raise ValueError(f"{type(owner).__name__}.{name} must have shape {shape}, got {found}.")

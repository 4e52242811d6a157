"""The LightningModule: one training step from a batch of stale rollouts to the next version of the adapter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from peft import PeftModel
from torch import Tensor

from estr_lite.checks import require_at_least, require_positive
from estr_lite.diagnostics import TokenDiagnostics, rollout_metrics
from estr_lite.loss import policy_loss
from estr_lite.objectives.base import Objective
from estr_lite.policy.adapter import causal_lm
from estr_lite.policy.score import score
from estr_lite.types import Batch, Evidence


@dataclass(frozen=True)
class Optim:
    """The optimizer step.

    Args:
        lr: AdamW's learning rate at its highest.
        decay: what the rate does over the run: `linear` falls to 0, `constant` stays.
        warmup: steps of linear rise at the start.
        weight_decay: AdamW's.
        max_grad_norm: gradients are scaled down to this norm.
        minibatches: optimizer steps a batch; above 1 the proximal policy differs from the current one.
        micro_batch: sequences a forward pass; the result does not depend on it.
        nonfinite_patience: steps in a row with non-finite engine logits before training stops.
    """

    lr: float = 1e-3
    decay: Literal["linear", "constant"] = "linear"
    warmup: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    minibatches: int = 1
    micro_batch: int = 64
    nonfinite_patience: int = 3

    def __post_init__(self) -> None:
        require_positive(self, lr=self.lr, max_grad_norm=self.max_grad_norm)
        require_at_least(
            self,
            1,
            minibatches=self.minibatches,
            micro_batch=self.micro_batch,
            nonfinite_patience=self.nonfinite_patience,
        )
        require_at_least(self, 0, warmup=self.warmup, weight_decay=self.weight_decay)


BROKEN_WEIGHTS = "The adapter or the base model holds NaN or infinite weights, or overflows in its dtype."


class NonFiniteError(RuntimeError):
    """Numbers that are not finite came up, and going on would ruin the adapter."""


class PolicyModule(L.LightningModule):
    """Trains the LoRA adapter with one objective; the base is frozen.

    Args:
        model: PEFT model, base frozen, adapter trainable.
        objective: says what every token is worth.
        optim: the optimizer step.
        temperature: at which the rollouts are sampled, and so scored.
        steps: training steps of the run, for the learning-rate schedule.
    """

    def __init__(self, model: PeftModel, objective: Objective, optim: Optim, temperature: float, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False  # several optimizer steps a batch, each over micro-batches
        self.model, self.objective, self.optim = model, objective, optim
        self.temperature, self.steps = temperature, steps
        self.tokens = TokenDiagnostics()
        self.nonfinite_steps = 0

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.optim.lr, weight_decay=self.optim.weight_decay)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)]

    def _rate(self, step: int) -> float:
        rise = min(1.0, (step + 1) / (self.optim.warmup + 1))
        return rise * (1 - step / self.steps) if self.optim.decay == "linear" else rise

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self._check_finite(batch)
        self.tokens.reset()
        self.keep = torch.zeros_like(batch.valid)  # (B, T), for whoever shows rollouts
        proximal = self._score_all(batch) if self.optim.minibatches > 1 else None
        norms = [self._optimizer_step(batch, rows, proximal) for rows in self._minibatches(batch)]
        schedulers = self.lr_schedulers()
        rate = schedulers.get_last_lr()[0]  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        schedulers.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue, reportOptionalMemberAccess]
        found = rollout_metrics(batch) | self.tokens.compute()
        self.log_dict(found | {"optim/lr": rate, "optim/grad_norm": sum(norms) / len(norms)})

    def evidence(self, batch: Batch, logp: Tensor, entropy: Tensor, proximal: Tensor | None) -> Evidence:
        """All that the objective may see; without a proximal pass the proximal policy is the current one."""
        return Evidence(
            logp=logp.detach(),
            proximal_logp=logp.detach() if proximal is None else proximal,
            behavior_logp=batch.behavior_logp,
            behavior_entropy=batch.behavior_entropy,
            entropy=entropy,
            advantage=batch.advantage,
            lag=batch.step - batch.version,
            mask=batch.valid,
        )

    def _minibatches(self, batch: Batch) -> list[Tensor]:
        """The rows of each optimizer step: `minibatches` parts of whole groups."""
        parts = batch.group.unique().tensor_split(self.optim.minibatches)
        return [torch.isin(batch.group, groups).nonzero().squeeze(1) for groups in parts]

    def _micro_batches(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """The rows in forward passes, like lengths together, since those waste least on padding."""
        order = batch.token_mask[rows].sum(1).argsort(stable=True)
        return list(rows[order].split(self.optim.micro_batch))

    @torch.no_grad()
    def _score_all(self, batch: Batch) -> Tensor:
        """(B, T) log-probabilities under the policy as it is before the step."""
        found = torch.zeros_like(batch.behavior_logp)
        for rows in self._micro_batches(batch, torch.arange(len(batch), device=found.device)):
            part = batch.rows(rows)
            found[rows, : part.token_ids.shape[1]] = score(causal_lm(self.model), part, self.temperature)[0]
        return found

    def _optimizer_step(self, batch: Batch, rows: Tensor, proximal: Tensor | None) -> float:
        """One step of the optimizer on those rows; the gradient's norm before clipping."""
        optimizer = self.optimizers()
        optimizer.zero_grad()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        total, kept = float(batch.valid[rows].sum()), 0.0
        for micro in self._micro_batches(batch, rows):
            part = batch.rows(micro)
            width = part.token_ids.shape[1]
            logp, entropy = score(causal_lm(self.model), part, self.temperature)
            evidence = self.evidence(part, logp, entropy, None if proximal is None else proximal[micro, :width])
            correction = self.objective(evidence)
            self.tokens.update(evidence, correction, int((part.action_mask & ~part.valid).sum()))
            self.keep[micro, :width] = correction.keep & part.valid
            kept += float((correction.keep & part.valid).sum())
            self.manual_backward(policy_loss(logp, correction, part.advantage, part.valid, total))
        trained = [p for p in self.model.parameters() if p.grad is not None]
        if not self.objective.rejected_in_z and kept:
            for parameter in trained:
                parameter.grad.mul_(total / kept)  # pyright: ignore[reportOptionalMemberAccess]
        norm = float(torch.nn.utils.clip_grad_norm_(trained, self.optim.max_grad_norm))
        if not math.isfinite(norm):
            bad = self._nonfinite(batch)
            raise NonFiniteError(
                f"Step {batch.step}: the gradient norm is {norm}. "
                + (f"In its batch {bad}. {BROKEN_WEIGHTS}" if bad else f"Try a lower optim.lr (now {self.optim.lr:g}).")
            )
        optimizer.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        return norm

    def _check_finite(self, batch: Batch) -> None:
        bad = self._nonfinite(batch)
        self.nonfinite_steps = self.nonfinite_steps + 1 if bad else 0
        if self.nonfinite_steps >= self.optim.nonfinite_patience:
            raise NonFiniteError(
                f"Step {batch.step}: {bad}, and for some in each of the last {self.nonfinite_steps} steps. "
                f"{BROKEN_WEIGHTS}"
            )

    def _nonfinite(self, batch: Batch) -> str:
        """What the engine could not score, in words; nothing where it could score all."""
        bad = int((batch.action_mask & ~batch.valid).sum())
        return f"the engine's logits were not finite for {bad} of {int(batch.action_mask.sum())} tokens" if bad else ""

"""The embedded engine: a static decode loop on the trainer's own model class, on any device and system.

A cohort is one batch. Its members and their order come from the tickets alone and every rollout has uniforms of its
own, so the content never depends on timing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from estr_lite.distribution import sample, uniforms
from estr_lite.policy.adapter import Versions, causal_lm, twin, write_tensors
from estr_lite.policy.score import score_sequence
from estr_lite.rollout.engine import Advance, Engine, Finished, Sampling, turn, version_at
from estr_lite.staleness import KvCache
from estr_lite.types import Rollout, Segment, Ticket

TOKENS_A_STEP = 64
"""Longest stretch that one `step` decodes, so that a stop request is seen in time."""
COMPACT_BELOW = 0.75
"""Finished rows leave the batch once the live ones are below this share of it."""


class TransformersEngine(Engine):
    """Decodes with a twin of the trainer's model: shared base, LoRA weights of its own.

    Args:
        model: the trainer's PEFT model.
        store: where adapter versions come from.
        stop: token ids that end a completion.
        kv: what an in-flight swap does with keys and values.
        max_rows: most rows in a cohort.
        stretch: most tokens that one `step` decodes. Live, adapters are swapped between two steps.
    """

    lanes, patience = 1, 0.0

    def __init__(
        self,
        model: PeftModel,
        store: Versions,
        stop: frozenset[int],
        kv: KvCache,
        max_rows: int,
        stretch: int = TOKENS_A_STEP,
    ) -> None:
        self.max_rows, self._stretch = max_rows, stretch
        self._model, self._store, self.kv = twin(model), store, kv
        self._stop = torch.tensor(sorted(stop), device=model.device)
        self._loaded = -1
        self._cohorts: list[_Cohort] = []

    def room(self, rows: int, latest: int) -> bool:
        return self.needs > latest  # one cohort at a time; others are admitted while it waits

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        self._cohorts.append(_Cohort(tickets, sampling, self._model.device))

    @property
    def needs(self) -> float:
        return min((cohort.version for cohort in self._cohorts), default=math.inf)

    @torch.inference_mode()
    def step(self, latest: int) -> Advance:
        cohort = next((c for c in self._cohorts if c.version <= latest), None)  # the oldest that can go on
        if cohort is None:
            return Advance(flying=self._flying())
        before, began = Counter(cohort.tally), list[tuple[Ticket, Segment]]()
        for _ in range(self._stretch):
            if cohort.done or cohort.version > latest:
                break
            if (segment := cohort.begins()) is not None:
                began.append((cohort.tickets[0], segment))
            self._decode(cohort)
        sampled = cohort.tally - before
        if not cohort.done:
            return Advance((), sampled, self._flying(), began)
        self._cohorts.remove(cohort)
        return Advance(cohort.finished(), sampled, self._flying(), began)

    def swap(self, version: int) -> None:
        for cohort in self._cohorts:
            cohort.turn(version)

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        self._load(version)
        return score_sequence(self._base, token_ids.to(self._model.device)).cpu()

    def close(self) -> None:
        self._cohorts.clear()

    def _flying(self) -> Counter[int]:
        return sum((cohort.tally for cohort in self._cohorts), Counter[int]())

    @property
    def _base(self) -> PreTrainedModel:
        return causal_lm(self._model)

    def _load(self, version: int) -> None:
        if version != self._loaded:
            write_tensors(self._model, self._store.tensors(version))
            self._loaded = version

    def _decode(self, cohort: _Cohort) -> None:
        """One token for every live row."""
        self._load(cohort.version)
        if self.kv == "recompute" and cohort.begins():
            cohort.cache = None
        if cohort.cache is None:
            cohort.cache = DynamicCache(config=self._base.config)
            ids = cohort.sequence()  # (R, P+t)
        else:
            ids = cohort.last[:, None]  # (R, 1)
        positions = cohort.positions[:, -ids.shape[1] :]
        out = self._base(
            input_ids=ids,
            attention_mask=cohort.mask,
            position_ids=positions,
            past_key_values=cohort.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cohort.append(*sample(out.logits[:, -1], cohort.uniform(), cohort.sampling.temperature), self._stop)


class _Cohort:
    """Rows that decode together: every ticket's rollouts, in order; `live` maps batch rows to rollouts."""

    def __init__(self, tickets: Sequence[Ticket], sampling: Sampling, device: torch.device) -> None:
        self.tickets, self.sampling = tickets, sampling
        self.segments = tickets[0].segments
        self.tally = Counter[int]()  # tokens by version
        self.cache: DynamicCache | None = None
        prompts = [t.prompt.token_ids for t in tickets for _ in range(sampling.rollouts)]
        rows, width, most = len(prompts), max(map(len, prompts)), sampling.max_tokens
        self._prompts = torch.zeros(rows, width, dtype=torch.long, device=device)  # (R, P)
        self.mask = torch.zeros(rows, width, dtype=torch.long, device=device)  # (R, P+t), grows
        for row, prompt in enumerate(prompts):
            self._prompts[row, width - len(prompt) :] = torch.tensor(prompt)
            self.mask[row, width - len(prompt) :] = 1
        draws = [uniforms(t.seed, i, most) for t in tickets for i in range(sampling.rollouts)]
        self._uniforms = torch.stack(draws).to(device)  # (R, T)
        self._tokens = torch.zeros(rows, most, dtype=torch.long, device=device)
        self._logp = torch.zeros(rows, most, device=device)
        self._entropy = torch.zeros(rows, most, device=device)
        self._lengths = torch.full((rows,), most, device=device)
        self._live = torch.arange(rows, device=device)
        self._running = torch.ones(rows, dtype=torch.bool, device=device)  # of the live rows
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self._t, self._left = 0, rows  # tokens so far, and rows that still run
        self.done = False

    @property
    def version(self) -> int:
        """The version that samples the next token."""
        return version_at(self.segments, self._t)

    def begins(self) -> Segment | None:
        """The segment whose first token is the next one; None where none begins."""
        return next((segment for segment in self.segments if segment.start == self._t), None)

    def turn(self, version: int) -> None:
        """From the next token on, `version` samples."""
        self.segments = turn(self.segments, self._t, version)

    @property
    def positions(self) -> Tensor:
        return (self.mask.cumsum(1) - 1).clamp(min=0)  # (R, P+t)

    @property
    def last(self) -> Tensor:
        return self._tokens[self._live, self._t - 1]

    def sequence(self) -> Tensor:
        return torch.cat([self._prompts[self._live], self._tokens[self._live, : self._t]], 1)

    def uniform(self) -> Tensor:
        return self._uniforms[self._live, self._t]

    def append(self, tokens: Tensor, logp: Tensor, entropy: Tensor, stop: Tensor) -> None:
        """Take the token that was sampled for every live row; rows that already finished only keep the batch whole."""
        self._tokens[self._live, self._t] = tokens
        self._logp[self._live, self._t] = logp
        self._entropy[self._live, self._t] = entropy
        self.tally[self.version] += self._left
        self._t += 1
        ended = self._running & torch.isin(tokens, stop)
        self._lengths[self._live[ended]] = self._t
        self._stopped[self._live[ended]] = True
        self._running &= ~ended
        self._left = left = int(self._running.sum())
        self.done = left == 0 or self._t == self.sampling.max_tokens
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        if not self.done and left < COMPACT_BELOW * len(self._live):
            keep = self._running.nonzero().squeeze(1)
            self._live, self._running, self.mask = self._live[keep], self._running[keep], self.mask[keep]
            assert self.cache is not None
            self.cache.batch_select_indices(keep)

    def finished(self) -> list[Finished]:
        lengths = self._lengths.tolist()
        versions = torch.tensor([version_at(self.segments, t) for t in range(self._t)])
        columns = [x.cpu() for x in (self._tokens, self._logp, self._entropy)]
        found = list[Finished]()
        for i, ticket in enumerate(self.tickets):
            rollouts = list[Rollout]()
            for row in range(i * self.sampling.rollouts, (i + 1) * self.sampling.rollouts):
                n = lengths[row]
                tokens, logp, entropy = (x[row, :n].clone() for x in columns)
                finish = "stop" if self._stopped[row] else "length"
                action = torch.ones(n, dtype=torch.bool)
                rollouts.append(
                    Rollout(tokens, logp, entropy, versions[:n].clone(), action, finish, reward=float("nan"))
                )
            found.append(Finished(replace(ticket, segments=self.segments), tuple(rollouts)))
        return found

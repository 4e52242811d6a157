"""The token ledger: every sampled token is in one account, and the books balance at every step.

    generated = trained + masked + dropped + queued + in flight, for every version
    finished  = trained + masked + dropped + queued,             for every bucket of completion lengths
    generated = finished + in flight + lost in flight,           in all

Every account is counted in another place, so that a fault shows: `generated` and `in flight` are what the engine says
it sampled; `finished` is read off the completions as they leave it; `trained`, `masked` and `dropped` off those that
end; and `queued` off those that really wait at the moment of the check. Only tokens that the policy sampled
count (`action`), in lengths too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from estr_lite.types import Rollout

LENGTH_EDGES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""In tokens; bucket i holds the lengths below edge i, one more bucket the rest."""
BUCKETS = (*(f"<{edge}" for edge in LENGTH_EDGES), f">={LENGTH_EDGES[-1]}")
ENDS = ("trained", "masked", "dropped")
"""Accounts that a token never leaves."""
NEWEST = 64
"""Versions that are kept apart; older ones, once all of their tokens have ended, are added up as version -1."""
SHOWN = 6
"""Lines of an error."""


class LedgerError(RuntimeError):
    """The books do not balance; the message has the numbers."""


class Ledger:
    """The accounts, in tokens; any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions = {name: Counter[int]() for name in ("generated", "in_flight", *ENDS)}
        self._lengths = {name: Counter[str]() for name in ("finished", *ENDS)}
        self._completions = {name: Counter[str]() for name in ("finished", "dropped")}
        self._causes = Counter[str]()
        self._lost = 0

    def advance(
        self, sampled: Mapping[int, int], flying: Mapping[int, int], finished: Sequence[Sequence[Rollout]]
    ) -> None:
        """One engine step.

        Args:
            sampled: tokens sampled in it, by version.
            flying: tokens of all completions that are in flight after it, by version.
            finished: the groups that left the engine in it.
        """
        _, lengths, counts = _count([rollout for group in finished for rollout in group])
        with self._lock:
            self._versions["generated"].update(sampled)
            self._versions["in_flight"] = +Counter(flying)
            self._lengths["finished"].update(lengths)
            self._completions["finished"].update(counts)

    def lose(self, cause: str) -> dict[int, int]:
        """All that is in flight is dropped: its engine, or its process, is gone. What was lost, by version."""
        with self._lock:
            lost, self._versions["in_flight"] = self._versions["in_flight"], Counter[int]()
            self._versions["dropped"].update(lost)
            self._causes[cause] += lost.total()
            self._lost += lost.total()
            return dict(lost)

    def drop(self, rollouts: Sequence[Rollout], cause: str) -> None:
        """Completions that will never be trained."""
        versions, lengths, counts = _count(rollouts)
        with self._lock:
            self._versions["dropped"].update(versions)
            self._lengths["dropped"].update(lengths)
            self._completions["dropped"].update(counts)
            self._causes[cause] += versions.total()

    def train(self, rollouts: Sequence[Rollout], trained: Sequence[Tensor]) -> None:
        """Completions that a step has consumed; `trained` (T_i) bool says which of their tokens carried gradient.

        The others, rejected by a rule or not finite, are masked.
        """
        kept, kept_lengths, _ = _chosen(rollouts, trained)
        whole, lengths, _ = _count(rollouts)
        with self._lock:
            self._versions["trained"].update(kept)
            self._versions["masked"].update(whole - kept)
            self._lengths["trained"].update(kept_lengths)
            self._lengths["masked"].update(lengths - kept_lengths)

    def check(self, waiting: Sequence[Rollout]) -> None:
        """Compare both sides; `waiting` are the completions between engine and trainer.

        Raises:
            LedgerError: where they differ, with the numbers.
        """
        versions, lengths, _ = _count(waiting)
        with self._lock:
            parts = {**{name: self._versions[name] for name in ENDS}, "queued": versions}
            parts["in_flight"] = self._versions["in_flight"]
            wrong = _differences("version", self._versions["generated"], parts, "generated")
            buckets = {**{name: self._lengths[name] for name in ENDS}, "queued": lengths}
            wrong += _differences("length", self._lengths["finished"], buckets, "finished")
            generated, flying = self._versions["generated"].total(), self._versions["in_flight"].total()
            finished = self._lengths["finished"].total()
            if generated != finished + flying + self._lost:
                wrong.append(
                    f"generated {generated} is not finished {finished} + in flight {flying} + lost {self._lost}"
                )
            self._fold(versions)
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise LedgerError(f"The token ledger does not balance: {'; '.join(wrong[:SHOWN])}{more}.")

    def totals(self, waiting: Sequence[Rollout]) -> dict[str, int]:
        """The accounts in all."""
        queued = _count(waiting)[0].total()
        with self._lock:
            return {**{name: counts.total() for name, counts in self._versions.items()}, "queued": queued}

    def table(self) -> dict[str, Any]:
        """The accounts by version and by length, the dropped tokens by cause, the completions by length."""
        with self._lock:
            return {
                "by_version": {name: _plain(counts) for name, counts in self._versions.items()},
                "by_length": {name: _plain(counts) for name, counts in self._lengths.items()},
                "completions": {name: _plain(counts) for name, counts in self._completions.items()},
                "dropped_by_cause": dict(self._causes),
                "lost_in_flight": self._lost,
            }

    def load(self, table: Mapping[str, Any]) -> None:
        """Go on from a table."""
        with self._lock:
            self._versions = {n: Counter({int(v): c for v, c in t.items()}) for n, t in table["by_version"].items()}
            self._lengths = {name: Counter(counts) for name, counts in table["by_length"].items()}
            self._completions = {name: Counter(counts) for name, counts in table["completions"].items()}
            self._causes, self._lost = Counter(table["dropped_by_cause"]), table["lost_in_flight"]

    def _fold(self, queued: Counter[int]) -> None:
        """Add up old versions, so that the books of a long run stay small."""
        bound = max(self._versions["generated"], default=0) - NEWEST
        open_still = self._versions["in_flight"].keys() | queued.keys()
        for name in ("generated", *ENDS):
            counts = self._versions[name]
            for version in [v for v in counts if 0 <= v < bound and v not in open_still]:
                counts[-1] += counts.pop(version)


def bucket(length: int) -> str:
    """The label of a length's bucket."""
    return BUCKETS[sum(length >= edge for edge in LENGTH_EDGES)]


Sums = tuple[Counter[int], Counter[str], Counter[str]]
"""Tokens by version, tokens by length bucket, completions by length bucket."""


def _count(rollouts: Sequence[Rollout]) -> Sums:
    """Sampled tokens and completions."""
    return _chosen(rollouts, [rollout.action for rollout in rollouts])


def _chosen(rollouts: Sequence[Rollout], which: Sequence[Tensor]) -> Sums:
    """The same for the sampled tokens that `which` (T_i) bool of each completion chooses."""
    if not rollouts:
        return Counter(), Counter(), Counter()
    sizes = torch.tensor([rollout.action.numel() for rollout in rollouts])  # (N)
    if [mask.numel() for mask in which] != sizes.tolist():
        raise ValueError(f"Masks of {[mask.numel() for mask in which]} tokens for completions of {sizes.tolist()}.")
    action = torch.cat([rollout.action for rollout in rollouts])  # (M)
    version = torch.cat([rollout.version for rollout in rollouts])  # (M)
    owner = torch.arange(len(rollouts)).repeat_interleave(sizes)  # (M)
    length = torch.zeros(len(rollouts), dtype=torch.long).index_add_(0, owner, action.long())  # (N)
    place = torch.bucketize(length, torch.tensor(LENGTH_EDGES), right=True)  # (N)
    chosen = action & torch.cat([mask.cpu() for mask in which])
    versions, counts = version[chosen].unique(return_counts=True)
    tokens = place[owner[chosen]].bincount(minlength=len(BUCKETS)).tolist()
    completions = place.bincount(minlength=len(BUCKETS)).tolist()
    by_version = Counter(dict(zip(versions.tolist(), counts.tolist(), strict=True)))
    return by_version, _named(tokens), _named(completions)


def _named(counts: Sequence[int]) -> Counter[str]:
    return Counter({name: count for name, count in zip(BUCKETS, counts, strict=True) if count})


def _differences(axis: str, whole: Mapping[Any, int], parts: Mapping[str, Mapping[Any, int]], name: str) -> list[str]:
    """Where the parts do not add up to the whole, in words."""
    wrong = list[str]()
    for key in sorted({*whole, *(key for part in parts.values() for key in part)}):
        numbers = {part: counts.get(key, 0) for part, counts in parts.items()}
        if whole.get(key, 0) != sum(numbers.values()):
            sums = " + ".join(f"{part} {count}" for part, count in numbers.items())
            wrong.append(f"{axis} {key}: {name} {whole.get(key, 0)} is not {sums} = {sum(numbers.values())}")
    return wrong


def _plain(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts, key=str)}

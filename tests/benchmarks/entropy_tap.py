"""What the exact behaviour entropy costs: decoding speed of the real vLLM engine with the tap over that without it.

Both sides are one engine in one process, taking turns on the same tickets, so that they decode the same tokens. On the
side without, the tap returns the logits at once and keeps no rows: what is left of it is two empty calls an engine
step, and a table that nobody fills. The policy is small and its vocabulary too, so a step is short, and the tap's fixed
costs weigh more than they would on a real model.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from statistics import median

from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate

from estr_lite.config import Config
from estr_lite.rollout import vllm_engine
from tests.benchmarks.report import parser, quiet, report, spread
from tests.lab import Lab, open_lab


class SwitchedTap(vllm_engine.EntropyTap):
    """The tap, with a switch and a stopwatch."""

    on = True
    busy = 0.0  # seconds within the tap

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if not self.on:
            self._rows.clear()
            return
        started = time.perf_counter()
        super().update_state(batch_update)
        SwitchedTap.busy += time.perf_counter() - started

    def apply(self, logits: Tensor) -> Tensor:
        if not self.on:
            return logits
        started = time.perf_counter()
        super().apply(logits)
        SwitchedTap.busy += time.perf_counter() - started
        return logits


@dataclass(frozen=True)
class Turn:
    """One cohort decoded."""

    tokens: int
    seconds: float
    busy: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def decode(lab: Lab, prompts: int, seed: int, tap: bool) -> Turn:
    """Decode a cohort with or without the tap."""
    SwitchedTap.on, SwitchedTap.busy = tap, 0.0
    tickets = [lab.ticket(slot, [(0, 1)], seed) for slot in range(prompts)]
    started = time.perf_counter()
    finished = lab.run(tickets, lab.config.sampling)
    seconds = time.perf_counter() - started
    rollouts = [rollout for done in finished for rollout in done.rollouts]
    assert all(bool(rollout.entropy.isfinite().all()) == tap for rollout in rollouts)
    return Turn(sum(map(len, rollouts)), seconds, SwitchedTap.busy)


def main() -> None:
    args = parser(__doc__).parse_args()
    quiet()
    vllm_engine.EntropyTap = SwitchedTap
    turns, prompts = (7, 4) if args.quick else (61, Config().prompts)
    pairs = list[tuple[Turn, Turn]]()
    with open_lab("vllm", Config(), versions=2, core=max(os.sched_getaffinity(0))) as lab:
        for tap in (True, False):
            decode(lab, prompts, 0, tap)  # warm-up
        for turn in range(1, turns + 1):
            order = (True, False) if turn % 2 else (False, True)
            found = {tap: decode(lab, prompts, turn, tap) for tap in order}
            pairs.append((found[True], found[False]))
            speeds = f"{found[True].speed:.0f} tokens/s with the tap, {found[False].speed:.0f} without"
            print(f"turn {turn} of {turns}: {speeds}", flush=True)
    report(
        args.quick,
        **spread("ratio", [a.speed / b.speed for a, b in pairs]),
        **spread("share_within_tap", [a.busy / a.seconds for a, _ in pairs]),
        tokens_per_second_with=median(a.speed for a, _ in pairs),
        tokens_per_second_without=median(b.speed for _, b in pairs),
        turns=turns,
    )


if __name__ == "__main__":
    main()

"""A run's event log as a plan: the cohorts, and the version of every token, as they came about."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estr_lite.rollout.source import Cohort
from estr_lite.staleness import KvCache
from estr_lite.types import Segment, Ticket


@dataclass(frozen=True)
class Trace:
    """What a log says.

    Args:
        steps: training steps that the log is whole for.
        lag: the most versions between a token and the step that trained on it.
        caches: what the run did with keys and values at a swap.
        cohorts: of every cohort the tickets that were trained, as (step, slot, number, segments).
    """

    steps: int
    lag: int
    caches: KvCache
    cohorts: tuple[tuple[tuple[int, int, int, tuple[Segment, ...]], ...], ...]

    def plan(self, make: Callable[[int, tuple[Segment, ...]], Ticket], start: int, steps: int) -> Iterator[Cohort]:
        """The cohorts that steps start to steps - 1 need; `make` is `Schedule.live`."""
        for cohort in self.cohorts:
            if any(start <= step < steps for step, _, _, _ in cohort):
                yield tuple(_ticket(make, *one) for one in cohort)


def read_trace(run: Path) -> Trace:
    """The trace of a run that is over, or of the part of it that its log has whole.

    Raises:
        FileNotFoundError: without an event log.
        ValueError: where no step was logged, or the log is not one of this version.
    """
    path = run / "events.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run} has no events.jsonl: name the folder of a run.")
    events = list(_events(path))
    starts = [event for event in events if event["event"] == "start"]
    if not starts or "prompts" not in starts[-1]:
        raise ValueError(f"{path} has no event `start`: the run never began to train.")
    start = starts[-1]
    admitted = dict[int, tuple[int, int]]()  # seed -> (cohort, number)
    for event in events:
        if event["event"] == "admit":
            for step, slot, _, seed in event["tickets"]:
                admitted[seed] = (event["cohort"], step * start["prompts"] + slot)
    cohorts, lag, steps = dict[int, list[tuple[int, int, int, tuple[Segment, ...]]]](), 0, 0
    for event in events:
        if event["event"] != "pop":
            continue
        for slot, _, seed, segments in event["tickets"]:
            cohort, number = admitted[seed]
            plan = tuple(Segment(*segment) for segment in segments)
            cohorts.setdefault(cohort, []).append((event["step"], slot, number, plan))
            lag = max(lag, event["step"] - plan[0].version)
        steps = max(steps, event["step"] + 1)
    if not steps:
        raise ValueError(f"{path} has no event `pop`: not one step was trained.")
    ordered = (tuple(sorted(cohorts[cohort], key=lambda one: one[2])) for cohort in sorted(cohorts))
    return Trace(steps, lag, start["kv"], tuple(ordered))


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Every event of a log; a last line that a kill cut off is left out."""
    for line in path.read_text("utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _ticket(
    make: Callable[[int, tuple[Segment, ...]], Ticket], step: int, slot: int, number: int, segments: tuple[Segment, ...]
) -> Ticket:
    made = make(number, segments)
    return Ticket(step, slot, made.prompt, segments, made.seed, clamped=False)

"""`RemoteEngine` and `serve` over a real pipe: what is asked again, and of whom, when an engine is lost.

Here the child is a thread, and the engine one that fails when it is told to; real processes that are killed, hang or
run out of memory are in `tests/faults.py`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Pipe
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from estr_lite.policy.adapter import AdapterStore
from estr_lite.rollout.engine import Advance, Engine, EngineError, Finished, Sampling
from estr_lite.rollout.remote import RemoteEngine, Watch
from estr_lite.rollout.serve import serve
from estr_lite.types import Prompt, Rollout, Segment, Ticket

SAMPLING = Sampling(rollouts=1, max_tokens=2)


class Told(Engine):
    """Finishes what it has at the next step; fails at the next call of that name that the script holds."""

    max_rows, lanes, patience = 8, 1, 0.0
    script: ClassVar[deque[str]] = deque()
    """Calls that fail, each once, in this order, whichever engine is there."""
    calls: ClassVar[list[tuple[int, str, tuple[Segment, ...]]]] = []
    """(number of the engine, call, segments of the first ticket)"""
    built: ClassVar[int] = 0

    def __init__(self) -> None:
        Told.built += 1
        self.number, self.tickets = Told.built, list[Ticket]()

    def _call(self, name: str, segments: tuple[Segment, ...] = ()) -> None:
        Told.calls.append((self.number, name, segments))
        if Told.script and Told.script[0] == name:
            Told.script.popleft()
            raise RuntimeError(f"{name} went wrong")

    def room(self, rows: int, latest: int) -> bool:
        return True

    @property
    def needs(self) -> float:
        return min((t.segments[0].version for t in self.tickets), default=float("inf"))

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        self._call("admit", tickets[0].segments)
        self.tickets += tickets

    def step(self, latest: int) -> Advance:
        self._call("step")
        done = [Finished(ticket, (rollout(ticket),)) for ticket in self.tickets]
        self.tickets.clear()
        return Advance(done, {0: 2 * len(done)})

    def swap(self, version: int) -> None:
        self._call("swap")

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        self._call("score")
        return token_ids[1:].float()

    def close(self) -> None:
        self._call("close")


def rollout(ticket: Ticket) -> Rollout:
    """Two tokens that name the ticket."""
    ids = torch.tensor([ticket.slot, ticket.slot])
    zeros, versions = torch.zeros(2), torch.full((2,), ticket.segments[0].version)
    return Rollout(ids, zeros, zeros, versions, torch.ones(2, dtype=torch.bool), "length", reward=float("nan"))


def told_engine(spec: Mapping[str, Any]) -> Engine:
    return Told()


class Threaded(RemoteEngine):
    """The child is a thread; all else is as it is."""

    def _start(self) -> None:
        ours, theirs = Pipe()
        spec = {"builder": f"{__name__}.told_engine", "threads": 1}
        threading.Thread(target=serve, args=(os.dup(theirs.fileno()), spec), daemon=True).start()
        theirs.close()
        self._connection = ours
        hello, _ = self._receive(self._watch.start, "asked to start")
        self.max_rows, self.lanes = int(hello["max_rows"]), int(hello["lanes"])

    def _kill(self) -> None:
        self._connection.close()  # which ends the thread


class NoFiles:
    """A store with nothing to write."""

    versions: ClassVar[dict[int, object]] = {}


def remote(restarts: int, *script: str) -> tuple[Threaded, list[str]]:
    Told.script, Told.calls, Told.built = deque(script), [], 0
    said = list[str]()
    watch = Watch(heartbeat=20, start=20, restarts=restarts)
    return Threaded({}, cast(AdapterStore, NoFiles()), 1, watch, said.append), said


def ticket(slot: int, version: int = 0) -> Ticket:
    return Ticket(0, slot, Prompt(f"p{slot}", (1, 2), "x"), (Segment(0, version),), seed=100 + slot, clamped=False)


def test_what_was_in_flight_is_admitted_again_and_its_loss_is_told_once() -> None:
    engine, said = remote(1, "step")
    engine.admit([ticket(0), ticket(1)], SAMPLING)
    engine.admit([ticket(2)], SAMPLING)
    advance = engine.step(0)
    assert [f.ticket.slot for f in advance.finished] == [0, 1, 2]
    assert [f.rollouts[0].token_ids.tolist() for f in advance.finished] == [[0, 0], [1, 1], [2, 2]]
    assert "step went wrong" in advance.lost
    assert [(number, call) for number, call, _ in Told.calls if number == 2] == [
        (2, "admit"),
        (2, "admit"),
        (2, "step"),
    ]
    assert len(said) == 2 and "Starting it again (1 of 1)" in said[0]
    engine.admit([ticket(3)], SAMPLING)
    assert engine.step(0).lost == ""


def test_finished_tickets_are_not_generated_again() -> None:
    engine, _ = remote(1)
    engine.admit([ticket(0)], SAMPLING)
    engine.step(0)
    Told.script.append("admit")
    engine.admit([ticket(1)], SAMPLING)
    assert [f.ticket.slot for f in engine.step(0).finished] == [1]


def test_an_engine_that_fails_on_taking_over_is_one_more_loss() -> None:
    engine, said = remote(2)
    engine.admit([ticket(0)], SAMPLING)
    Told.script.extend(("step", "admit"))
    advance = engine.step(0)
    assert [f.ticket.slot for f in advance.finished] == [0] and Told.built == 3
    assert "admit went wrong" in advance.lost
    assert [line for line in said if "(2 of 2)" in line]


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_the_last_loss_ends_it_with_its_cause_and_the_bound(restarts: int) -> None:
    engine, _ = remote(restarts, *["score"] * (restarts + 1))
    with pytest.raises(EngineError, match=rf"score went wrong.* {restarts} times, which is watch\.restarts"):
        engine.score(0, torch.arange(4))
    assert Told.built == restarts + 1


def test_live_what_was_in_flight_starts_again_on_the_newest_version() -> None:
    engine, _ = remote(1)
    engine.admit([ticket(0, version=3)], SAMPLING)
    engine.swap(5)
    Told.script.append("step")
    assert engine.step(5).finished[0].ticket.segments == (Segment(0, 5),)
    assert Told.calls[-2] == (2, "admit", (Segment(0, 5),))


def test_a_lost_swap_is_asked_again() -> None:
    engine, _ = remote(1)
    engine.admit([ticket(0, version=3)], SAMPLING)
    Told.script.append("swap")
    engine.swap(5)
    assert [(number, call) for number, call, _ in Told.calls][-3:] == [(1, "swap"), (2, "admit"), (2, "swap")]
    assert engine.needs == 3

"""An engine in a process of its own: the protocol over a pipe, and what to do when the process dies, hangs or fails.

The trainer keeps its interpreter to itself, so neither side waits for the other's lock; and a process, unlike a thread,
can be ended. Messages are safetensors blobs (`codec.py`); adapters are read from the store's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from torch import Tensor

from estr_lite.checks import require_at_least, require_positive
from estr_lite.codec import pack, ticket_from_json, ticket_to_json, unpack, unpack_rollouts
from estr_lite.policy.adapter import AdapterStore
from estr_lite.rollout.engine import Advance, Engine, EngineError, Finished, Sampling, turn
from estr_lite.types import Segment, Ticket


@dataclass(frozen=True)
class Watch:
    """How long to wait for what may never come, and how often to try again.

    Args:
        heartbeat: seconds that an engine step or a grade may take before it counts as hung.
        start: seconds that an engine may take to start.
        restarts: times that an engine process which died, hung or failed is started again in a run.
    """

    heartbeat: float = 120.0
    start: float = 900.0
    restarts: int = 3

    def __post_init__(self) -> None:
        require_positive(self, heartbeat=self.heartbeat, start=self.start)
        require_at_least(self, 0, restarts=self.restarts)

    @property
    def patience(self) -> float:
        """Seconds within which a watched engine answers or is given up."""
        return (self.heartbeat + self.start) * (self.restarts + 1)


class EngineLost(EngineError):
    """The engine's process is gone, silent, or told of a failure."""


class RemoteEngine(Engine):
    """Forwards every call to an engine in a child process, and starts another one where that is lost.

    What was in flight is started again from its first token: controlled, under the versions that its tickets name;
    live, under the newest.

    Args:
        spec: what the child needs to build the engine, JSON values; `builder` names the function that does it.
        store: whose folder the child reads adapters from.
        threads: OpenMP threads of the child.
        watch: how long to wait, how often to restart.
        tell: told every restart, in words.

    Raises:
        EngineError: if the engine cannot start, or was lost more often than `watch.restarts`.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        store: AdapterStore,
        threads: int,
        watch: Watch,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._spec, self._store, self._threads, self._watch, self._tell = spec, store, threads, watch, tell
        self.patience, store.files = watch.patience, True
        self._cohorts: dict[int, tuple[Sequence[Ticket], Sampling]] = {}  # in flight, by the seed of the first ticket
        self._swapped = -1
        self._restarts = 0
        self._lost = ""
        self._written = set[int]()  # versions whose folders the child can read
        self._needs = float("inf")
        self._start()

    # the protocol

    def room(self, rows: int, latest: int) -> bool:
        return bool(self._ask({"op": "room", "rows": rows, "latest": latest})["room"])

    @property
    def needs(self) -> float:
        return self._needs  # as of the last answer

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        self._write_adapters(tickets[0].segments[0].version)
        self._ask(_admission(tickets, sampling))
        self._cohorts[tickets[0].seed] = (tickets, sampling)

    def step(self, latest: int) -> Advance:
        self._write_adapters(latest)
        reply, tensors = self._exchange({"op": "step", "latest": latest})
        finished = [Finished(*pair) for pair in unpack_rollouts(reply["finished"], tensors)]
        for one in finished:
            self._cohorts.pop(one.ticket.seed, None)
        lost, self._lost = self._lost, ""
        return Advance(
            finished=finished,
            sampled={int(version): n for version, n in reply["sampled"].items()},
            flying={int(version): n for version, n in reply["flying"].items()},
            segments=[(ticket_from_json(ticket), Segment(*segment)) for ticket, segment in reply["segments"]],
            lost=lost,
        )

    def swap(self, version: int) -> None:
        self._write_adapters(version)
        self._ask({"op": "swap", "version": version})
        self._swapped = version

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        self._write_adapters(version)
        return self._exchange({"op": "score", "version": version}, {"token_ids": token_ids})[1]["logp"]

    def close(self) -> None:
        """End the child, by force where it does not go."""
        try:
            self._connection.send_bytes(pack({"op": "close"}, {}))
            self._child.wait(timeout=self._watch.heartbeat)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._kill()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    # messages

    def _ask(self, header: Mapping[str, Any]) -> dict[str, Any]:
        return self._exchange(header)[0]

    def _exchange(
        self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The answer; a child that is lost on the way is replaced and asked again."""
        while True:
            try:
                return self._attempt(header, tensors or {})
            except EngineLost as failure:
                loss: EngineLost | None = failure
            while loss:
                loss = self._restart(loss)

    def _attempt(
        self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            self._connection.send_bytes(pack(header, tensors))
        except OSError as failure:
            raise self._gone() from failure
        return self._receive(self._watch.heartbeat, f"asked to {header['op']}")

    def _receive(self, seconds: float, doing: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        try:
            if not self._connection.poll(seconds):
                raise EngineLost(f"the engine process gave no sign of life for {seconds:g} s when {doing}")
            reply, tensors = unpack(self._connection.recv_bytes())
        except (EOFError, OSError) as failure:
            raise self._gone() from failure
        if "error" in reply:
            raise EngineLost(f"the engine failed when {doing}: {reply['error']}")
        self._needs = float("inf") if reply["needs"] is None else reply["needs"]
        return reply, tensors

    def _gone(self) -> EngineLost:
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return EngineLost("the engine process closed its pipe")
        signal = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return EngineLost(f"the engine process {signal}")

    def _write_adapters(self, latest: int) -> None:
        """Every version that the child may ask for, into the store's folder."""
        there = self._store.versions.keys()
        self._written &= there
        for version in there - self._written:
            if version <= latest:
                self._store.write(version)
                self._written.add(version)

    # the process

    def _start(self) -> None:
        ours, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()  # the child ends when our end of it closes, however we die
        command = [sys.executable, "-m", "estr_lite.rollout.child", str(theirs.fileno()), str(lifeline)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "ESTR_LITE_ENGINE": json.dumps(self._spec)}
        self._child = subprocess.Popen(command, pass_fds=(theirs.fileno(), lifeline), env=environment)
        self._connection: Connection = ours
        theirs.close()
        os.close(lifeline)
        try:
            hello, _ = self._receive(self._watch.start, "asked to start")
        except EngineLost as loss:
            self._kill()
            raise EngineError(_sentence(loss)) from loss
        self.max_rows, self.lanes = int(hello["max_rows"]), int(hello["lanes"])

    def _restart(self, loss: EngineLost) -> EngineLost | None:
        """Another child with the same cohorts in flight; how that one was lost, where it does not take them."""
        self._kill()
        self._restarts += 1
        if self._restarts > self._watch.restarts:
            raise EngineError(
                f"{_sentence(loss)} It was started again {self._watch.restarts} times, which is watch.restarts."
            ) from loss
        self._tell(f"{_sentence(loss)} Starting it again ({self._restarts} of {self._watch.restarts}).")
        self._lost = str(loss)
        began = time.monotonic()
        self._start()
        for tickets, sampling in self._cohorts.values():
            if self._swapped >= 0:  # live: under the newest
                newest = turn(tickets[0].segments, 0, max(self._swapped, tickets[0].segments[0].version))
                tickets = [replace(ticket, segments=newest) for ticket in tickets]
            try:
                self._attempt(_admission(tickets, sampling), {})
            except EngineLost as again:
                return again
        self._tell(f"The engine is back after {time.monotonic() - began:.1f} s.")

    def _kill(self) -> None:
        self._connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        self._child.kill()
        self._child.wait()


def _admission(tickets: Sequence[Ticket], sampling: Sampling) -> dict[str, Any]:
    return {"op": "admit", "tickets": [ticket_to_json(ticket) for ticket in tickets], "sampling": asdict(sampling)}


def _sentence(failure: EngineError) -> str:
    text = str(failure).rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."

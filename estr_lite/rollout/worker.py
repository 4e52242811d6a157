"""The worker: drives an engine in a thread of its own, as far ahead as versions or the lag bound allow.

Controlled, it starts cohorts in the schedule's order and stops at the first one that names an adapter which does not
exist yet: with a lag of one step or more generation and training overlap, and what is generated does not change. Live,
it starts on the newest adapter and swaps in flight.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from estr_lite.ledger import Ledger
from estr_lite.policy.adapter import AdapterStore
from estr_lite.rollout.engine import Advance, Engine, EngineError, Finished, Sampling
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.rollout.source import Cohort, Source
from estr_lite.tasks.base import Task, Tokenizer
from estr_lite.types import Group, Ticket

R = TypeVar("R")
GRACE = 10.0
"""Seconds that a thread gets to end before it is given up; it is a daemon, so it cannot keep the process alive."""


class CanaryError(EngineError):
    """The engine does not score the probe as the trainer does: its adapter or its cache is not the one it should be."""


class EngineThread:
    """The one thread that builds an engine, calls it and closes it.

    Args:
        build: makes the engine.
        threads: OpenMP threads for torch in this thread; two teams on the same cores crawl (DESIGN.md, "Cores").
    """

    def __init__(self, build: Callable[[], Engine], threads: int) -> None:
        self._jobs = queue.SimpleQueue[Callable[[], None] | None]()
        self._engine = self._enqueue(lambda: self._start(build, threads))
        self._thread = threading.Thread(target=self._run, name="estr-lite-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Engine], R]) -> Future[R]:
        """Run a job on the engine after those before it."""
        return self._enqueue(lambda: job(self._engine.result()))

    def close(self) -> None:
        """Close the engine once the running job has ended, and end the thread; one that hangs is given up."""
        self._jobs.put(self._close)
        self._jobs.put(None)
        self._thread.join(GRACE)

    def _close(self) -> None:
        if not self._engine.exception():
            self._engine.result().close()

    def _enqueue(self, job: Callable[[], R]) -> Future[R]:
        future = Future[R]()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as failure:
                future.set_exception(failure)

        self._jobs.put(run)
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    @staticmethod
    def _start(build: Callable[[], Engine], threads: int) -> Engine:
        torch.set_num_threads(threads)
        return build()


@dataclass(frozen=True, eq=False)
class Rules:
    """What a producer keeps to.

    Args:
        source: where the cohorts come from.
        sampling: how to sample them.
        swap: whether a new version takes over trajectories in flight.
        patience: seconds that one step of the engine, or one grade, may take.
    """

    source: Source
    sampling: Sampling
    swap: bool
    patience: float


class Producer:
    """The job of a training run: every cohort decoded, graded and put into the mailbox, every token in the ledger.

    Args:
        rules: what it keeps to.
        task: whose grader judges.
        tokenizer: the grader's.
        mailbox: where versions come from and groups go.
        ledger: told every token.
        store: told which versions tickets in flight need.
        canary: called after each engine step with the engine and the newest version that the step had; what the step
            sampled is delivered only if it passes.
        log: told every event, by name and fields.
        delay: called before each engine step; a test puts random sleeps here.
    """

    def __init__(
        self,
        rules: Rules,
        task: Task,
        tokenizer: Tokenizer,
        mailbox: Mailbox,
        ledger: Ledger,
        store: AdapterStore,
        canary: Callable[[Engine, int], None],
        log: Callable[..., None],
        delay: Callable[[], None] = lambda: None,
    ) -> None:
        self._rules, self._task, self._tokenizer, self._mailbox = rules, task, tokenizer, mailbox
        self._ledger, self._store, self._canary, self._log, self._delay = ledger, store, canary, log, delay
        self._swapped = self._stepped = -1  # newest version swapped to, and that a step has had
        self._cohorts = 0

    def __call__(self, engine: Engine) -> None:
        """Run to the end, or until the mailbox is stopped; a failure is delivered through the mailbox."""
        try:
            rules = self._rules
            for advance in decode(
                engine, rules.source, rules.sampling, self._mailbox, self._before_step, self._admitted, self._patience
            ):  # fmt: skip
                for ticket, segment in advance.segments:
                    self._log("segment", seed=ticket.seed, start=segment.start, version=segment.version)
                with self._mailbox.promise(self._patience(engine), "the engine scores the probe"):
                    self._canary(engine, self._stepped)  # after the step, so that no trajectory waits for it
                self._deliver(advance)
        except BaseException as failure:
            self._mailbox.fail(failure)
            raise

    def _patience(self, engine: Engine) -> float:
        return self._rules.patience + engine.patience

    def _admitted(self, cohort: Cohort) -> None:
        self._store.hold(s.version for ticket in cohort for s in ticket.segments)
        self._mailbox.flying |= {ticket.seed: ticket for ticket in cohort}
        tickets = [[t.step, t.slot, t.prompt.uid, t.seed] for t in cohort]
        self._log("admit", cohort=self._cohorts, version=cohort[0].segments[0].version, tickets=tickets)
        self._cohorts += 1

    def _before_step(self, engine: Engine, latest: int) -> None:
        self._delay()
        self._stepped = latest
        if self._rules.swap and latest > self._swapped:
            engine.swap(latest)
            self._swapped = latest
            self._log("swap", version=latest, tickets=len(self._mailbox.flying))

    def _deliver(self, advance: Advance) -> None:
        """One engine step into the books, all at once."""
        graded, waiting = list[Group](), list[Finished]()
        for finished in advance.finished:
            if self._task.waits:
                waiting.append(finished)
                continue
            with self._mailbox.promise(self._rules.patience, f"grading {finished.ticket.prompt.uid}"):
                graded.append(grade(finished, self._task, self._tokenizer))
        with self._mailbox.lock:
            if advance.lost:
                lost = self._ledger.lose("engine")
                self._log("lost", cause=advance.lost, tokens=sum(lost.values()))
            self._ledger.advance(advance.sampled, advance.flying, [f.rollouts for f in advance.finished])
            for finished in advance.finished:
                begun = self._mailbox.flying.pop(finished.ticket.seed)
                self._store.release(s.version for s in begun.segments)
            self._mailbox.grading |= {f.ticket.seed: (f, time.monotonic()) for f in waiting}
            for group in graded:
                self._mailbox.put(group)
        for finished in waiting:
            self._grade_apart(finished)

    def _grade_apart(self, finished: Finished) -> None:
        """A thread for every rollout, since their graders wait for something; the last to end delivers the group."""
        rewards = dict[int, float]()

        def one(index: int) -> None:
            try:
                reward = _judge(finished.ticket, finished.rollouts[index].token_ids, self._task, self._tokenizer)
            except BaseException as failure:
                self._mailbox.fail(failure)
                return
            with self._mailbox.lock:
                rewards[index] = reward
                if len(rewards) == len(finished.rollouts):
                    del self._mailbox.grading[finished.ticket.seed]
                    self._mailbox.put(_group(finished, [rewards[i] for i in range(len(rewards))]))

        for index in range(len(finished.rollouts)):
            threading.Thread(target=one, args=(index,), name="estr-lite-grader", daemon=True).start()


def decode(
    engine: Engine,
    source: Source,
    sampling: Sampling,
    mailbox: Mailbox,
    before_step: Callable[[Engine, int], None] = lambda engine, latest: None,
    admitted: Callable[[Cohort], None] = lambda cohort: None,
    patience: Callable[[Engine], float] = lambda engine: math.inf,
) -> Iterator[Advance]:
    """Decode cohorts in order, each as soon as it may start, waiting at any token whose version does not exist.

    Ends early when the mailbox is stopped.
    """
    running = 0
    while (running or not source.done) and not mailbox.stopped:
        latest = mailbox.latest
        with mailbox.promise(patience(engine), "the engine decodes"):
            while (cohort := source.offer(latest)) and engine.room(len(cohort) * sampling.rollouts, latest):
                engine.admit(cohort, sampling)
                with mailbox.lock:
                    source.admitted()
                    admitted(cohort)
                running += len(cohort)
            busy = engine.needs <= latest
            if busy:
                before_step(engine, latest)
                advance = engine.step(latest)
        if not busy:
            full = bool(cohort)  # there was one to start, but no room for it
            mailbox.wait_beyond(latest, lambda at=latest, full=full: not full and bool(source.offer(at)))
            continue
        running -= len(advance.finished)
        yield advance


class Canary:
    """Scores a probe in the engine under every version published, and compares with the trainer's own score.

    A stale prefix cache, a forgotten adapter or a wrong slot shows at once (DESIGN.md, "The canary").

    Args:
        store: holds what the trainer scored.
        probe: (N) token ids.
        tolerance: largest difference that passes, in nats.
    """

    def __init__(self, store: AdapterStore, probe: Tensor, tolerance: float) -> None:
        self._store, self._probe, self._tolerance = store, probe, tolerance
        self._checked = -1
        self.worst = 0.0
        """Largest difference seen, in nats."""

    def __call__(self, engine: Engine, latest: int) -> None:
        for version in range(self._checked + 1, latest + 1):
            adapter = self._store.get(version)
            if adapter is None or not bool(adapter.probe_logp.isfinite().all()):
                continue  # no ticket can name it any more, or the policy has blown up, which the module counts
            found = engine.score(version, self._probe)
            if not bool(found.isfinite().all()):
                raise CanaryError(
                    f"Canary of adapter version {version}: the engine's logits on the probe are not finite, the "
                    "trainer's are. The base or the adapter overflows in the engine's dtype, or did not arrive whole."
                )
            error = float((adapter.probe_logp - found).abs().max())
            self.worst = max(self.worst, error)
            if error > self._tolerance:
                raise CanaryError(
                    f"Canary of adapter version {version}: engine and trainer differ by {error:.3g} nats on the probe, "
                    f"tolerance {self._tolerance:g}. The engine serves another adapter, or reads a stale cache."
                )
        self._checked = latest


def grade(finished: Finished, task: Task, tokenizer: Tokenizer) -> Group:
    """The group with every rollout's reward, judged on its decoded text."""
    return _group(finished, [_judge(finished.ticket, r.token_ids, task, tokenizer) for r in finished.rollouts])


def _judge(ticket: Ticket, token_ids: Tensor, task: Task, tokenizer: Tokenizer) -> float:
    return task.grade(ticket.prompt.reference, tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


def _group(finished: Finished, rewards: Sequence[float]) -> Group:
    pairs = zip(finished.rollouts, rewards, strict=True)
    return Group(finished.ticket, tuple(replace(rollout, reward=reward) for rollout, reward in pairs))

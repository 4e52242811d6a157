"""The worker: drives an engine in a thread of its own and runs ahead exactly as far as versions allow.

It starts cohorts in the schedule's order and stops at the first one that names an adapter which does not exist yet.
With a lag of one step or more, generation and training overlap; what is generated does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from estr_lite.policy.adapter import AdapterStore
from estr_lite.rollout.engine import Engine, EngineError, Finished, Sampling
from estr_lite.rollout.mailbox import Mailbox
from estr_lite.schedule import Schedule, cohorts
from estr_lite.tasks.base import Task, Tokenizer
from estr_lite.types import Group, Ticket

R = TypeVar("R")


class CanaryError(EngineError):
    """The engine does not score the probe as the trainer does: its adapter or its cache is not the one it should be."""


class EngineThread:
    """The one thread that builds an engine, calls it and closes it.

    Args:
        build: makes the engine.
        threads: OpenMP threads for torch in this thread; two teams on the same cores crawl (DESIGN.md, "Cores").
    """

    def __init__(self, build: Callable[[], Engine], threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="estr-lite-engine")
        self._engine = self._pool.submit(self._start, build, threads)

    def submit(self, job: Callable[[Engine], R]) -> Future[R]:
        """Run a job on the engine after those before it."""
        return self._pool.submit(lambda: job(self._engine.result()))

    def close(self) -> None:
        """Close the engine once the running job has ended, and end the thread."""
        if not self._engine.exception():
            self._pool.submit(self._engine.result().close)
        self._pool.shutdown(wait=True)

    @staticmethod
    def _start(build: Callable[[], Engine], threads: int) -> Engine:
        torch.set_num_threads(threads)
        return build()


class Producer:
    """The job of a training run: every step's cohorts, decoded, graded and put into the mailbox.

    Args:
        schedule: which tickets.
        steps: the training steps to serve.
        sampling: how to sample them.
        mailbox: where versions come from and groups go.
        canary: called before each engine step with the engine and the newest version.
        delay: called before each engine step; a test puts random sleeps here.
    """

    def __init__(
        self,
        schedule: Schedule,
        steps: range,
        sampling: Sampling,
        mailbox: Mailbox,
        canary: Callable[[Engine, int], None],
        delay: Callable[[], None] = lambda: None,
    ) -> None:
        self._schedule, self._steps, self._sampling, self._mailbox = schedule, steps, sampling, mailbox
        self._canary, self._delay = canary, delay
        self.generated = 0
        """Tokens sampled so far."""

    def __call__(self, engine: Engine) -> None:
        """Run to the end, or until the mailbox is stopped; a failure is delivered through the mailbox."""
        try:
            for finished in decode(engine, self._cohorts(engine), self._sampling, self._mailbox, self._before_step):
                group = grade(finished, self._schedule.task, self._schedule.tokenizer)
                self.generated += sum(map(len, group.rollouts))
                self._mailbox.put(group)
        except BaseException as failure:
            self._mailbox.fail(failure)
            raise

    def _before_step(self, engine: Engine, latest: int) -> None:
        self._delay()
        self._canary(engine, latest)

    def _cohorts(self, engine: Engine) -> Iterator[tuple[Ticket, ...]]:
        most = max(1, engine.max_rows // self._sampling.rollouts)
        for step in self._steps:
            yield from cohorts(self._schedule.tickets(step), most)


def decode(
    engine: Engine,
    cohorts: Iterable[tuple[Ticket, ...]],
    sampling: Sampling,
    mailbox: Mailbox,
    before_step: Callable[[Engine, int], None] = lambda engine, latest: None,
) -> Iterator[Finished]:
    """Decode cohorts in order, each as soon as its first version exists, waiting at any token whose version does not.

    Ends early when the mailbox is stopped.
    """
    pending = iter(cohorts)
    cohort, running = next(pending, None), 0
    while (cohort or running) and not mailbox.stopped:
        latest = mailbox.latest
        while (
            cohort and cohort[0].segments[0].version <= latest and engine.room(len(cohort) * sampling.rollouts, latest)
        ):
            engine.admit(cohort, sampling)
            cohort, running = next(pending, None), running + len(cohort)
        if not engine.runnable(latest):
            mailbox.wait_beyond(latest)
            continue
        before_step(engine, latest)
        for finished in engine.step(latest):
            running -= 1
            yield finished


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
    graded = list[float]()
    for rollout in finished.rollouts:
        text = tokenizer.decode(rollout.token_ids.tolist(), skip_special_tokens=True)
        graded.append(task.grade(finished.ticket.prompt.reference, text))
    pairs = zip(finished.rollouts, graded, strict=True)
    return Group(finished.ticket, tuple(replace(rollout, reward=reward) for rollout, reward in pairs))

"""Two real threads meet: groups by slot, versions in time, and no way to wait for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from estr_lite.rollout.mailbox import Mailbox, RolloutError, Silence, Stopped
from tests.builders import make_group

R = TypeVar("R")
PATIENCE = 5.0  # seconds


def in_thread(job: Callable[[], R]) -> Future[R]:
    """Start the job in a thread that cannot keep the tests from ending, and give it time to fall asleep."""
    future = Future[R]()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.05)
    assert not future.done()
    return future


def test_groups_come_sorted_by_slot_once_all_have_arrived() -> None:
    mailbox = Mailbox()
    taken = in_thread(lambda: mailbox.take(5, 4))
    for slot in (2, 0, 3):
        mailbox.put(make_group(5, slot))
    time.sleep(0.05)
    assert not taken.done()  # three of four
    mailbox.put(make_group(5, 1))
    assert [group.ticket.slot for group in taken.result(PATIENCE)] == [0, 1, 2, 3]


def test_steps_do_not_mix_and_may_arrive_ahead_of_their_turn() -> None:
    mailbox = Mailbox()
    for step, slot in ((6, 1), (5, 1), (6, 0), (5, 0)):
        mailbox.put(make_group(step, slot))
    for step in (5, 6):
        groups = mailbox.take(step, 2)
        assert [(g.ticket.step, g.ticket.slot) for g in groups] == [(step, 0), (step, 1)]


def test_a_failure_reaches_the_waiter_with_its_cause() -> None:
    mailbox, cause = Mailbox(), KeyError("adapter 7")
    taken = in_thread(lambda: mailbox.take(5, 1))
    mailbox.fail(cause)
    with pytest.raises(RolloutError, match=r"failed before step 5: 'adapter 7'") as error:
        taken.result(PATIENCE)
    assert error.value.__cause__ is cause


def test_a_failure_reaches_whoever_comes_to_wait_later() -> None:
    mailbox = Mailbox()
    mailbox.fail(MemoryError("no room"))
    for _ in range(2):
        with pytest.raises(RolloutError, match="no room"):
            mailbox.take(0, 1)


def test_a_failure_in_a_thread_that_works_for_the_mailbox_reaches_the_trainer_in_time() -> None:
    mailbox = Mailbox()

    def work() -> None:
        try:
            mailbox.wait_beyond(-1)
            raise ZeroDivisionError("in the worker")
        except BaseException as failure:
            mailbox.fail(failure)
            raise

    worker, taken = in_thread(work), in_thread(lambda: mailbox.take(0, 1))
    mailbox.announce(0)
    with pytest.raises(RolloutError) as error:
        taken.result(PATIENCE)
    assert error.value.__cause__ is worker.exception(PATIENCE)


def test_stop_ends_both_sides() -> None:
    mailbox = Mailbox()
    mailbox.announce(2)
    taken = in_thread(lambda: mailbox.take(5, 1))
    waiting = in_thread(lambda: mailbox.wait_beyond(2))
    mailbox.stop()
    assert waiting.result(PATIENCE) == 2 and mailbox.stopped
    with pytest.raises(Stopped):
        taken.result(PATIENCE)


def test_a_step_that_is_complete_is_still_given_out_after_a_stop() -> None:
    mailbox = Mailbox()
    mailbox.put(make_group(5))
    mailbox.stop()
    assert len(mailbox.take(5, 1)) == 1


def test_an_announcement_wakes_whoever_waits_for_a_version_beyond_the_one_he_has() -> None:
    mailbox = Mailbox()
    assert mailbox.latest == -1
    waiting = in_thread(lambda: mailbox.wait_beyond(0))
    mailbox.announce(0)
    time.sleep(0.05)
    assert not waiting.done()  # 0 is not beyond 0
    mailbox.announce(1)
    assert waiting.result(PATIENCE) == 1 == mailbox.latest
    assert mailbox.wait_beyond(0) == 1  # at once


def test_the_time_a_worker_stands_idle_is_counted() -> None:
    mailbox = Mailbox()
    waiting = in_thread(lambda: mailbox.wait_beyond(-1))
    mailbox.announce(0)
    waiting.result(PATIENCE)
    assert 0.04 < mailbox.waited < PATIENCE


def test_many_groups_from_many_threads_all_arrive() -> None:
    mailbox, steps, slots = Mailbox(), 20, 8
    with ThreadPoolExecutor(4) as pool:
        for step in range(5, 5 + steps):
            for slot in range(slots):
                pool.submit(mailbox.put, make_group(step, slot))
        for step in range(5, 5 + steps):
            assert [g.ticket.slot for g in mailbox.take(step, slots)] == list(range(slots))


def test_a_promise_that_is_broken_is_told_by_what_was_being_done() -> None:
    mailbox = Mailbox()
    with mailbox.promise(0.1, "the engine decodes"), pytest.raises(RolloutError, match="the engine decodes") as error:
        mailbox.take(3, 1)
    assert isinstance(error.value.__cause__, Silence)


def test_a_worker_that_stands_idle_has_promised_nothing() -> None:
    mailbox = Mailbox()
    with mailbox.promise(0.1, "the engine decodes"):
        pass
    taken = in_thread(lambda: mailbox.take(5, 1))
    time.sleep(0.5)
    assert not taken.done()
    mailbox.put(make_group(5))
    assert len(taken.result(PATIENCE)) == 1

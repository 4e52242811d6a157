"""The books balance through every legal history, and every way to lose or make up a token is named with its numbers."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from estr_lite.ledger import NEWEST, Ledger, LedgerError
from estr_lite.types import Rollout
from tests.builders import make_rollout


def make(length: int, version: int = 3) -> Rollout:
    """A completion of one version."""
    return make_rollout(length, version=torch.full((length,), version))


def grown(rollout: Rollout, version: int) -> Rollout:
    """The completion with one more token."""
    return make_rollout(len(rollout) + 1, version=torch.cat([rollout.version, torch.tensor([version])]))


def sampled(*rollouts: Rollout) -> Counter[int]:
    """What the engine would say of these completions."""
    return Counter(tag for rollout in rollouts for tag in rollout.version[rollout.action].tolist())


def finished(*rollouts: Rollout) -> Ledger:
    """A ledger with these completions, each a group, between engine and trainer."""
    ledger = Ledger()
    ledger.advance(sampled(*rollouts), {}, [[rollout] for rollout in rollouts])
    ledger.check(rollouts)
    return ledger


def whole(*rollouts: Rollout) -> list[Tensor]:
    """Masks that leave no token out."""
    return [torch.ones(len(rollout), dtype=torch.bool) for rollout in rollouts]


def reloaded(ledger: Ledger) -> Ledger:
    again = Ledger()
    again.load(json.loads(json.dumps(ledger.table())))
    return again


def fault(ledger: Ledger, *waiting: Rollout) -> str:
    """What the check says; a restart does not make it good."""
    with pytest.raises(LedgerError) as error:
        ledger.check(waiting)
    with pytest.raises(LedgerError):
        reloaded(ledger).check(waiting)
    return str(error.value)


class Run:
    """A legal run: an engine, a queue and a trainer that tell a ledger all they do, and count for themselves."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.flying: list[Rollout] = []
        self.queue: list[Rollout] = []
        self.version = 0
        self.expected = Counter[str]()

    def sample(self, count: int) -> None:
        """Every completion in flight grows by a token of the newest version, `count` new ones start, some finish."""
        rows = [grown(rollout, self.version) for rollout in self.flying] + [make(1, self.version)] * count
        done, self.flying = rows[::3], [row for i, row in enumerate(rows) if i % 3]
        self.queue += done
        self.expected["generated"] += len(rows)
        self.ledger.advance({self.version: len(rows)}, sampled(*self.flying), [done])

    def publish(self, count: int) -> None:
        self.version += 30 * count

    def lose(self, count: int) -> None:
        lost = sampled(*self.flying)
        assert self.ledger.lose("engine") == lost
        self.expected["dropped"] += lost.total()
        self.flying = []

    def drop(self, count: int) -> None:
        gone, self.queue = self.queue[:count], self.queue[count:]
        self.expected["dropped"] += sampled(*gone).total()
        self.ledger.drop(gone, "max_lag")

    def train(self, count: int) -> None:
        batch, self.queue = self.queue[:count], self.queue[count:]
        kept = [torch.arange(len(rollout)) % 3 > 0 for rollout in batch]
        self.expected["trained"] += sum(int(mask.sum()) for mask in kept)
        self.expected["masked"] += sum(int((~mask).sum()) for mask in kept)
        self.ledger.train(batch, kept)

    def restart(self, count: int) -> None:
        self.ledger = reloaded(self.ledger)
        self.lose(count)


Act = Callable[[Run, int], None]
EVENTS: list[Act] = [*[Run.sample] * 4, Run.publish, Run.lose, Run.drop, Run.train, Run.restart]
histories = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 6)), max_size=40)


@given(histories)
def test_every_legal_history_balances_after_every_event(history: list[tuple[Act, int]]) -> None:
    run = Run()
    for act, count in history:
        act(run, count)
        run.ledger.check(run.queue)
        run.expected["queued"] = sampled(*run.queue).total()
        run.expected["in_flight"] = sampled(*run.flying).total()
        found = run.ledger.totals(run.queue)
        assert found == {name: run.expected[name] for name in found}


@given(histories)
def test_the_table_adds_up_to_the_totals_and_survives_a_round_trip(history: list[tuple[Act, int]]) -> None:
    run = Run()
    for act, count in history:
        act(run, count)
        run.ledger.check(run.queue)
    totals, table = run.ledger.totals(run.queue), run.ledger.table()
    versions = {name: sum(counts.values()) for name, counts in table["by_version"].items()}
    lengths = {name: sum(counts.values()) for name, counts in table["by_length"].items()}
    assert versions == {name: totals[name] for name in versions}
    assert lengths["finished"] == totals["generated"] - totals["in_flight"] - table["lost_in_flight"]
    assert lengths["dropped"] == totals["dropped"] - table["lost_in_flight"]
    assert (lengths["trained"], lengths["masked"]) == (totals["trained"], totals["masked"])
    assert sum(table["dropped_by_cause"].values()) == totals["dropped"]
    again = reloaded(run.ledger)
    assert (again.table(), again.totals(run.queue)) == (table, totals)
    again.check(run.queue)


def test_a_group_lost_between_put_and_train_is_missing() -> None:
    lost, kept = make(20), make(4)
    ledger = finished(lost, kept)
    ledger.train([kept], whole(kept))
    found = fault(ledger)  # nothing waits
    assert "version 3: generated 24 is not trained 4 + masked 0 + dropped 0 + queued 0 + in_flight 0 = 4" in found
    assert "length <32: finished 20 is not trained 0 + masked 0 + dropped 0 + queued 0 = 0" in found
    ledger.check([lost])


def test_a_completion_trained_twice_shows_whatever_else_waits() -> None:
    one, other = make(4), make(5)
    ledger = finished(one, other)
    ledger.train([one], whole(one))
    ledger.check([other])
    ledger.train([one], whole(one))
    found = fault(ledger, other)
    assert "version 3: generated 9 is not trained 8 + masked 0 + dropped 0 + queued 5 + in_flight 0 = 13" in found
    assert "length <8: finished 9 is not trained 8 + masked 0 + dropped 0 + queued 5 = 13" in found


def test_a_completion_twice_in_one_batch_shows() -> None:
    one = make(4)
    ledger = finished(one)
    ledger.train([one, one], whole(one, one))
    assert "version 3: generated 4 is not trained 8 " in fault(ledger)


def test_a_completion_trained_while_it_still_waits_shows() -> None:
    one = make(4)
    ledger = finished(one)
    ledger.train([one], whole(one))
    assert "generated 4 is not trained 4 + masked 0 + dropped 0 + queued 4 " in fault(ledger, one)


def test_a_version_tag_changed_on_the_way_shows_in_both_versions() -> None:
    honest, other = make(6, version=3), make(6, version=4)
    forged = replace(honest, version=torch.tensor([3, 3, 4, 4, 4, 4]))
    ledger = finished(honest, other)
    assert "version 3: generated 6 is not trained 0 + masked 0 + dropped 0 + queued 2 " in fault(ledger, forged, other)
    ledger.train([forged, other], whole(forged, other))
    found = fault(ledger)
    assert "version 3: generated 6 is not trained 2 " in found
    assert "version 4: generated 6 is not trained 10 " in found


def test_a_sampled_token_that_never_appears_shows_between_engine_and_queue() -> None:
    ledger, done, flying = Ledger(), make(5), make(3, version=4)
    ledger.advance({3: 5, 4: 3}, sampled(flying), [])  # the first has left the engine, but by no door
    found = fault(ledger)
    assert "version 3: generated 5 is not " in found and "version 4" not in found
    assert "generated 8 is not finished 0 + in flight 3 + lost 0" in found
    ledger.advance({}, sampled(flying), [[done]])
    ledger.check([done])


def test_a_completion_dropped_and_trained_as_well_shows() -> None:
    one = make(4)
    ledger = finished(one)
    ledger.drop([one], "max_lag")
    ledger.check([])
    ledger.train([one], whole(one))
    assert "version 3: generated 4 is not trained 4 + masked 0 + dropped 4 " in fault(ledger)


def test_one_completion_in_place_of_another_shows_by_length_where_versions_agree() -> None:
    ledger = finished(make(4), make(12))
    pair = make(8), make(8)
    ledger.train(pair, whole(*pair))
    found = fault(ledger)
    assert "version" not in found
    assert "length <8: finished 4 is not trained 0 " in found and "length <16: finished 12 is not trained 16 " in found


def test_tokens_that_a_tool_wrote_are_in_no_account_and_make_no_completion_longer() -> None:
    action = torch.tensor([True, False, False, True, True, False, True, True, True, False])
    one, silent = make_rollout(10, action=action), make_rollout(3, action=torch.zeros(3, dtype=torch.bool))
    ledger = finished(one, silent)
    assert ledger.totals([one, silent])["queued"] == 6
    ledger.train([one, silent], whole(one, silent))
    ledger.check([])
    assert {name: n for name, n in ledger.totals([]).items() if n} == {"generated": 6, "trained": 6}
    assert ledger.table()["by_length"]["finished"] == {"<8": 6}


def test_tokens_without_gradient_are_masked() -> None:
    one = make(4)
    ledger = finished(one)
    ledger.train([one], [torch.tensor([True, False, False, True])])
    ledger.check([])
    assert {name: n for name, n in ledger.totals([]).items() if n} == {"generated": 4, "trained": 2, "masked": 2}


def test_a_length_bias_of_what_is_dropped_shows() -> None:
    short, longer, longest = make(7), make(8), make(8192)
    ledger = finished(short, longer, longest)
    ledger.drop([longer, longest], "max_lag")
    ledger.train([short], whole(short))
    ledger.check([])
    table = ledger.table()
    dropped = {"<16": 1, ">=8192": 1}
    assert table["completions"] == {"finished": {"<8": 1, **dropped}, "dropped": dropped}
    assert table["by_length"]["dropped"] == {"<16": 8, ">=8192": 8192}
    assert table["dropped_by_cause"] == {"max_lag": 8200}


def test_folding_keeps_the_totals_and_every_version_that_is_not_done_with() -> None:
    ledger, waiting = Ledger(), make(5, version=1)
    ledger.advance({1: 5, 2: 3}, {2: 3}, [[waiting]])  # one is never consumed, one never finishes
    for version in range(3, 503):
        one = make(4, version)
        ledger.advance({version: 4}, {2: 3}, [[one]])
        ledger.train([one], [torch.tensor([True, True, True, False])])
        ledger.check([waiting])
    by_version = ledger.table()["by_version"]
    assert {"1", "2", *map(str, range(503 - NEWEST, 503))} <= by_version["generated"].keys()
    assert all(len(counts) <= 2 * NEWEST + 4 for counts in by_version.values())
    assert by_version["generated"]["-1"] == by_version["trained"]["-1"] + by_version["masked"]["-1"]
    counts = {"generated": 2008, "trained": 1500, "masked": 500, "dropped": 0, "queued": 5, "in_flight": 3}
    assert ledger.totals([waiting]) == counts
    again = reloaded(ledger)
    again.check([waiting])
    again.train([waiting], whole(waiting))
    again.lose("killed")
    again.check([])
    assert not {"1", "2"} & again.table()["by_version"]["generated"].keys()


def test_a_fault_in_a_folded_version_still_shows() -> None:
    ledger, first = Ledger(), make(4, version=0)
    for version in range(3 * NEWEST):
        one = make(4, version) if version else first
        ledger.advance({version: 4}, {}, [[one]])
        ledger.train([one], whole(one))
        ledger.check([])
    assert "0" not in ledger.table()["by_version"]["generated"]
    ledger.train([first], whole(first))
    assert "version 0: generated 0 is not trained 4 " in fault(ledger)
    assert "version -1: " in fault(ledger)  # folded since, and not forgotten


def test_a_long_list_of_faults_is_cut() -> None:
    ledger = Ledger()
    ledger.advance({version: 1 for version in range(30)}, {}, [])
    found = fault(ledger)
    assert "version 0: " in found and "version 29: " not in found and " more." in found


def test_a_check_and_a_train_of_nothing_are_fine() -> None:
    ledger = Ledger()
    ledger.train([], [])
    ledger.drop([], "max_lag")
    ledger.check([])
    assert ledger.lose("engine") == {} and not any(ledger.totals([]).values())


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_no_thread_sees_a_torn_state(hasty: None) -> None:
    ledger, done, failures = Ledger(), threading.Event(), list[Exception]()

    def watch() -> None:
        try:
            while not done.is_set():
                ledger.check([])
                found = ledger.totals([])
                assert 2 * found["generated"] == sum(found.values())
        except Exception as failure:
            failures.append(failure)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3000):
        ledger.advance({3: 9}, {3: 9}, [])
        ledger.advance({4: 1}, {3: 9, 4: 1}, [])
        ledger.lose("engine")
    done.set()
    watcher.join()
    assert not failures
    ledger.check([])

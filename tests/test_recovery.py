"""A run that was stopped, or fell over, goes on to the same bytes; one that cannot go on says why.

Kills at random moments and engines that fail are in `tests/faults.py`, which `test_benchmarks.py` runs.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from estr_lite.metrics_file import rewind
from estr_lite.replay import read_trace
from tests.runs import TINY, call, one_line, scratch

STEPS = 4
RUN = (*TINY, "--steps", STEPS, "--mode", "Synchronous", "--sampling.max_tokens", 16, "--optim.lr", 1e-2)
RUN = (*RUN, "--checkpoint.every", 1, "--log.rollouts_every", 1, "--objective", "estr_lite.objectives.KeepAll")
LIVE = (*RUN, "--mode", "Live", "--mode.max_lag", 2)
AT = ("--task.call", 13)  # of 16 grades: three steps are trained by then, and too few are left for another effect


def adapter(run: Path) -> bytes:
    return (run / "adapters" / str(STEPS) / "adapter_model.safetensors").read_bytes()


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind, without their times."""
    found = [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]
    return [{k: v for k, v in event.items() if k != "time"} for event in found if event["event"] == kind]


def new() -> Path:
    """A folder that is gone with the tests."""
    folder = Path(mkdtemp(prefix="estr-lite-test-"))
    atexit.register(shutil.rmtree, folder)
    return folder / "run"


@cache
def whole() -> Path:
    """The run that nothing disturbs."""
    run = new()
    assert call("train", *RUN, "--run", run) == 0
    return run


@cache
def live() -> Path:
    """A live one."""
    run = new()
    assert call("train", *LIVE, "--run", run) == 0
    return run


def terminated(run: Path) -> Path:
    """A run that SIGTERM ended after three steps."""
    objective = ("--objective", "tests.failing.TerminatingObjective", "--objective.step", 2)  # of the three, the last
    assert call("train", *RUN, *objective, "--run", run) == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    return run


# stopped, and gone on


def test_sigterm_writes_a_checkpoint_and_ends_well_and_resume_ends_in_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = terminated(tmp_path / "run")
    assert "SIGTERM after step 3 of 4; the checkpoint is saved. To go on: estr-lite resume" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["interrupted"] == "SIGTERM"
    assert call("resume", run) == 0
    assert "going on from the checkpoint of step 3" in capsys.readouterr().out
    assert adapter(run) == adapter(whole())
    assert [event["step"] for event in events(run, "step")] == list(range(STEPS))
    assert scratch(os.getpid()) == []


def tear(checkpoint: Path) -> None:
    """A power cut: half of the largest file is there."""
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def exchange(checkpoint: Path) -> None:
    """Somebody put another run's in its place."""
    other = new()
    assert call("train", *RUN, "--seed", 1, "--checkpoint.keep", STEPS, "--run", other) == 0
    shutil.rmtree(checkpoint)
    shutil.copytree(other / "checkpoints" / checkpoint.name, checkpoint)


@pytest.mark.parametrize("damage", [tear, exchange])
def test_a_torn_or_foreign_checkpoint_is_refused_aloud_and_the_one_before_used(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = terminated(tmp_path / "run")
    damage(run / "checkpoints" / "step-000003")
    capsys.readouterr()
    assert call("resume", run) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "step-000003 is refused, because" in told and "step-000002 is used instead" in told
    assert "going on from the checkpoint of step 2" in told
    assert adapter(run) == adapter(whole())


@pytest.mark.parametrize(("place", "told"), [("done", "is done"), ("nothing", "has no config.yaml")])
def test_what_cannot_be_resumed_is_named(
    place: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("resume", whole() if place == "done" else tmp_path) == 2
    assert told in capsys.readouterr().err


# fallen over


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_ends_the_run_with_its_name_and_costs_nothing_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert call("train", *RUN, "--task", "tests.failing.FullDiskTask", *AT, "--run", run) == 1
    assert "No space left on device" in one_line(capsys.readouterr().err, "train")
    assert scratch(os.getpid()) == []
    assert call("resume", run) == 0
    assert adapter(run) == adapter(whole())
    assert [event["step"] for event in events(run, "step")] == list(range(STEPS))


@pytest.mark.parametrize("task", ["HangingTask", "HangingTool"])
def test_a_grader_that_never_returns_ends_the_run_within_the_bound_and_names_the_problem(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hanging = ("--task", f"tests.failing.{task}", *AT, "--watch.heartbeat", 2)
    began = time.monotonic()
    assert call("train", *RUN, *hanging, "--run", tmp_path / "run") == 1
    assert time.monotonic() - began < 22  # of which the thread gets ten to end
    line = one_line(capsys.readouterr().err, "train")
    assert "The rollout worker hangs before step 3" in line and "while grading" in line
    assert scratch(os.getpid()) == []


# replayed


def test_the_replay_of_a_live_run_is_that_run_byte_for_byte(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert call("replay", live(), "--run", run) == 0
    assert events(run, "pop") == events(live(), "pop")
    assert adapter(run) == adapter(live())


def test_another_objective_is_trained_on_the_same_schedule(tmp_path: Path) -> None:
    grpo = ("--objective", "Grpo", "--optim.minibatches", 2)
    run = tmp_path / "run"
    assert call("replay", live(), *grpo, "--run", run) == 0
    assert events(run, "pop") == events(live(), "pop")
    assert adapter(run) != adapter(live())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "has no events.jsonl"),
        ("", "has no event `start`"),
        (json.dumps({"event": "start", "prompts": 2, "kv": "keep"}), "has no event `pop`"),
    ],
)
def test_a_log_without_a_schedule_is_refused(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    assert call("replay", tmp_path) in (1, 2)
    assert told in capsys.readouterr().err


def test_a_line_that_a_kill_cut_off_is_no_part_of_the_schedule(tmp_path: Path) -> None:
    text = (live() / "events.jsonl").read_text("utf-8")
    last = text.rindex('{"event": "pop"')
    (tmp_path / "events.jsonl").write_text(text[: last + 40], "utf-8")
    assert read_trace(live()).steps == STEPS
    assert read_trace(tmp_path).steps == STEPS - 1


# metrics


def test_rewound_metrics_have_the_rows_before_a_step_and_none_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,a,b\n0,1,2\n1,3,4\n2,5,6\n3,7", "utf-8")
    rewind(file, 9)
    assert file.read_text().splitlines() == ["step,a,b", "0,1,2", "1,3,4", "2,5,6"]
    rewind(file, 1)
    assert file.read_text().splitlines() == ["step,a,b", "0,1,2"]
    rewind(file, 0)
    assert not file.exists()
    rewind(file, 0)  # nothing to do


# live


@pytest.mark.parametrize("swap", ["keep", "recompute", "drain"])
@pytest.mark.parametrize("bound", ["wait", "drop"])
def test_live_no_token_is_trained_beyond_the_bound_and_the_books_balance(swap: str, bound: str, tmp_path: Path) -> None:
    how, run = ("--mode.swap", swap, "--mode.at_bound", bound, "--mode.max_lag", 1), tmp_path / "run"
    assert call("train", *LIVE, *how, "--run", run) == 0
    rows = list[dict[str, Any]]()
    for path in (run / "rollouts").glob("*.jsonl"):
        step, found = int(path.stem.split("-")[1]), [json.loads(line) for line in path.read_text().splitlines()]
        assert all(0 <= step - version <= 1 for row in found for version in row["version"])
        rows += found
    books = json.loads((run / "ledger.json").read_text())
    assert books["generated"] == sum(books[n] for n in ("trained", "masked", "dropped", "queued", "in_flight"))
    assert books["trained"] + books["masked"] == sum(len(row["token_ids"]) for row in rows)
    if swap == "drain":
        assert all(len(ticket[3]) == 1 for event in events(run, "pop") for ticket in event["tickets"])
    if bound == "wait":
        assert books["dropped"] == 0 and not events(run, "drop")

"""A checkpoint is whole or not there; one that is not as it was written is refused, said aloud, and never used."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import estr_lite
from estr_lite.checkpoint import BUFFER, MANIFEST, STATE, TENSORS, Checkpoint, Checkpoints
from estr_lite.codec import pack, pack_rollouts
from estr_lite.policy.adapter import Adapter, known
from tests.builders import make_group

ROOT = Path(estr_lite.__file__).parents[1]
IDENTITY = "a3f1"
FILES = [STATE, TENSORS, BUFFER, "adapters/20.safetensors", MANIFEST]
posix = pytest.mark.skipif(os.name != "posix", reason="needs fork and resource limits")


def make_adapter(version: int) -> Adapter:
    tensors = {"layer.lora_A.weight": torch.full((2, 8), float(version)), "layer.lora_B.weight": torch.ones(8, 2)}
    return Adapter(version, tensors, known(torch.tensor([-1.5, -float(version)])))


def make_checkpoint(step: int, versions: tuple[int, ...] = (), text: str = "state") -> Checkpoint:
    return Checkpoint(
        step=step,
        state={"text": text, "cursor": [1, 2, {"seed": 2**63}], "loss": 0.1},
        tensors={"weight": torch.full((3, 4), float(step)).T, "rng": torch.arange(9).byte(), "none": torch.empty(0)},
        groups=[make_group(step, slot) for slot in range(step % 3)],
        adapters={version: make_adapter(version) for version in versions or (step,)},
    )


def essence(checkpoint: Checkpoint) -> tuple[object, ...]:
    """All of a checkpoint as values that compare, bit for bit."""
    header, rollouts = pack_rollouts([(group.ticket, group.rollouts) for group in checkpoint.groups])
    adapters = {
        version: (a.version, pack({}, a.tensors), pack({}, {"probe": a.probe_logp}))
        for version, a in checkpoint.adapters.items()
    }
    return checkpoint.step, checkpoint.state, pack({}, checkpoint.tensors), pack({"groups": header}, rollouts), adapters


def open_folder(folder: Path, keep: int = 9, identity: str = IDENTITY) -> tuple[Checkpoints, list[str]]:
    said = list[str]()
    return Checkpoints(folder, keep, identity, said.append), said


def expect_newest(folder: Path, expected: Checkpoint) -> list[str]:
    """The newest is the expected one; gives what was said."""
    checkpoints, said = open_folder(folder)
    found = checkpoints.newest()
    assert found is not None
    assert essence(found) == essence(expected)
    return said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    checkpoints, _ = open_folder(tmp_path / "run" / "checkpoints")
    assert checkpoints.newest() is None
    for step in (9, 10, 11):
        written = make_checkpoint(step, versions=(step - 1, step))
        assert checkpoints.write(written) == tmp_path / "run" / "checkpoints" / f"step-{step:06d}"
        assert expect_newest(checkpoints.folder, written) == []


def test_a_manifest_has_size_and_sum_of_every_other_file(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)[0].write(make_checkpoint(20))
    manifest = json.loads((folder / MANIFEST).read_text())
    assert {key: manifest[key] for key in ("format", "identity", "step")} == {
        "format": 1,
        "identity": "a3f1",
        "step": 20,
    }
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert set(present) == set(FILES)
    sizes = {name: path.stat().st_size for name, path in present.items() if name != MANIFEST}
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == sizes


def test_only_the_last_are_kept_and_nothing_is_left_over(tmp_path: Path) -> None:
    checkpoints, _ = open_folder(tmp_path, keep=3)
    (tmp_path / ".step-000001.part" / "adapters").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    for step in (5, 10, 100, 1_000_000, 1_000_001):
        checkpoints.write(make_checkpoint(step))
    assert names(tmp_path) == ["notes.txt", "step-000100", "step-1000000", "step-1000001"]
    expect_newest(tmp_path, make_checkpoint(1_000_001))


def test_fewer_than_one_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        open_folder(tmp_path, keep=0)


def test_a_step_that_is_written_again_is_replaced(tmp_path: Path) -> None:
    checkpoints, _ = open_folder(tmp_path, keep=1)
    for text in ("first", "second", "third"):
        checkpoints.write(make_checkpoint(20, text=text))
        assert names(tmp_path) == ["step-000020"]
        expect_newest(tmp_path, make_checkpoint(20, text=text))


# Adapters


def test_an_adapter_of_the_checkpoint_before_is_linked(tmp_path: Path) -> None:
    checkpoints, _ = open_folder(tmp_path, keep=2)
    first = checkpoints.write(make_checkpoint(10, versions=(8, 9)))
    second = checkpoints.write(make_checkpoint(11, versions=(9, 10)))
    shared = second / "adapters" / "9.safetensors"
    assert shared.stat().st_ino == (first / "adapters" / "9.safetensors").stat().st_ino
    assert (shared.stat().st_nlink, (second / "adapters" / "10.safetensors").stat().st_nlink) == (2, 1)
    checkpoints.write(make_checkpoint(12, versions=(12,)))  # the first goes, what it shared stays
    assert shared.stat().st_nlink == 1
    shutil.rmtree(tmp_path / "step-000012")
    assert expect_newest(tmp_path, make_checkpoint(11, versions=(9, 10))) == []


def test_an_adapter_is_written_where_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    checkpoints, _ = open_folder(tmp_path)
    for step in (10, 11):
        written = checkpoints.write(make_checkpoint(step, versions=(9,)))
        assert (written / "adapters" / "9.safetensors").stat().st_nlink == 1
    expect_newest(tmp_path, make_checkpoint(11, versions=(9,)))


def test_a_damaged_adapter_is_not_linked_on(tmp_path: Path) -> None:
    checkpoints, _ = open_folder(tmp_path)
    flip(checkpoints.write(make_checkpoint(10, versions=(9,))) / "adapters" / "9.safetensors", 70, 0)
    checkpoints.write(make_checkpoint(11, versions=(9,)))
    assert expect_newest(tmp_path, make_checkpoint(11, versions=(9,))) == []


# Refusals


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "short": halve,
    "empty": lambda path: os.truncate(path, 0),
    "flipped": lambda path: flip(path, path.stat().st_size // 2, 3),
    "missing": Path.unlink,
}
REASONS = {
    "short": "bytes where|damaged",
    "empty": "bytes where|damaged",
    "flipped": "damaged",
    "missing": "is missing",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_torn_checkpoint_is_refused_and_the_one_before_used(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints, _ = open_folder(tmp_path)
    checkpoints.write(make_checkpoint(10))
    torn = checkpoints.write(make_checkpoint(20))
    DAMAGES[damage](torn / name)
    (sentence,) = expect_newest(tmp_path, make_checkpoint(10))
    assert sentence.startswith(f"Checkpoint {torn} is refused, because ")
    assert name in sentence
    assert re.search(REASONS[damage], sentence)
    assert sentence.endswith("; step-000010 is used instead.")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.integers(0, 2**16), bit=st.integers(0, 7))
def test_no_bit_can_change_unseen(tmp_path: Path, name: str, place: int, bit: int) -> None:
    whole = tmp_path / "whole"
    if not whole.exists():
        open_folder(whole)[0].write(make_checkpoint(20))
    shutil.rmtree(tmp_path / "torn", ignore_errors=True)
    shutil.copytree(whole, tmp_path / "torn")
    flip(tmp_path / "torn" / "step-000020" / name, place, bit)
    checkpoints, said = open_folder(tmp_path / "torn")
    assert checkpoints.newest() is None
    assert len(said) == 1


def test_where_all_are_torn_there_is_none_and_each_is_named(tmp_path: Path) -> None:
    checkpoints, said = open_folder(tmp_path)
    for step in (10, 20):
        halve(checkpoints.write(make_checkpoint(step)) / TENSORS)
    assert checkpoints.newest() is None
    assert [re.search(r"step-\d+", sentence)[0] for sentence in said] == ["step-000020", "step-000010"]  # pyright: ignore[reportOptionalSubscript]
    assert all(sentence.endswith("; there is no other to use instead.") for sentence in said)


def test_a_checkpoint_of_another_run_is_refused_and_stays(tmp_path: Path) -> None:
    open_folder(tmp_path)[0].write(make_checkpoint(10))
    foreign = open_folder(tmp_path, identity="b2")[0].write(make_checkpoint(20))
    (sentence,) = expect_newest(tmp_path, make_checkpoint(10))
    assert sentence == (
        f"Checkpoint {foreign} is refused, because its identity is 'b2', not 'a3f1': a run of another configuration or "
        "model wrote it; step-000010 is used instead."
    )
    checkpoints, _ = open_folder(tmp_path, keep=1)
    checkpoints.newest()
    checkpoints.write(make_checkpoint(30))
    assert names(tmp_path) == ["step-000020", "step-000030"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("format", 2, "its format is 2, not 1"),
        ("step", 21, "its step is 21, not 20"),
        ("files", {}, "does not list ['buffer.safetensors', 'state.json', 'tensors.safetensors']"),
        ("files", [1], "manifest.json is damaged"),
    ],
)
def test_a_manifest_that_says_otherwise_is_refused_by_field(
    tmp_path: Path, field: str, value: object, reason: str
) -> None:
    checkpoints, said = open_folder(tmp_path)
    path = checkpoints.write(make_checkpoint(20)) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert checkpoints.newest() is None
    assert reason in said[0]


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{}", '{"format": 1'])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    checkpoints, said = open_folder(tmp_path)
    (checkpoints.write(make_checkpoint(20)) / MANIFEST).write_text(text)
    assert checkpoints.newest() is None
    assert "manifest.json is damaged" in said[0]


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    checkpoints, said = open_folder(tmp_path)
    path = checkpoints.write(make_checkpoint(20)) / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"]["../../secret"] = manifest["files"][STATE]
    path.write_text(json.dumps(manifest))
    assert checkpoints.newest() is None
    assert "lists ['../../secret']" in said[0]


def test_a_refused_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    first, _ = open_folder(tmp_path)
    first.write(make_checkpoint(10))
    halve(first.write(make_checkpoint(20)) / STATE)
    checkpoints, _ = open_folder(tmp_path, keep=2)
    checkpoints.newest()
    checkpoints.write(make_checkpoint(15))  # below the torn one
    checkpoints.write(make_checkpoint(20))  # in its place
    assert names(tmp_path) == ["step-000015", "step-000020"]
    assert expect_newest(tmp_path, make_checkpoint(20)) == []


# Failures while writing


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@posix
@pytest.mark.parametrize("size", [0, 100, 300, 700])
def test_a_file_that_cannot_be_written_leaves_earlier_checkpoints(tmp_path: Path, size: int) -> None:
    checkpoints, _ = open_folder(tmp_path, keep=1)
    checkpoints.write(make_checkpoint(10))
    with file_limit(size), pytest.raises(OSError, match=r"step-000020 cannot be written: File too large.*another run"):
        checkpoints.write(make_checkpoint(20))
    assert names(tmp_path) == ["step-000010"]
    expect_newest(tmp_path, make_checkpoint(10))


@pytest.mark.parametrize("step", [10, 20], ids=["the same step", "the next step"])
def test_a_disk_that_fills_up_at_any_moment_costs_nothing_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    sync, calls = os.fsync, 0

    def full(number: int) -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    failures = 0
    while True:
        folder = tmp_path / str(failures)
        checkpoints, _ = open_folder(folder, keep=1)
        calls = 0
        checkpoints.write(make_checkpoint(10, text="earlier"))
        calls = failures + 1
        try:
            checkpoints.write(make_checkpoint(step))
        except OSError as error:
            failures += 1
            assert f"Checkpoint {folder}" in str(error)
            assert "No space left on device" in str(error)
            assert "Free disk space, or name another run folder" in str(error)
        else:
            break
        found = checkpoints.newest()
        assert found is not None
        assert essence(found) in (essence(make_checkpoint(10, text="earlier")), essence(make_checkpoint(step)))
        assert not list(folder.glob("*.part"))
    assert failures >= len(FILES)


def test_a_state_that_is_not_json_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints, _ = open_folder(tmp_path)
    bad = make_checkpoint(10)
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoints.write(Checkpoint(10, {"loss": float("nan")}, bad.tensors, bad.groups, bad.adapters))
    assert names(tmp_path) == []


# Kills. One process imports torch and forks; its children write and are killed.


def in_child(job: Callable[[], None]) -> int:
    """Start the job in a child of this process; its id."""
    child = os.fork()
    if child == 0:
        try:
            job()
            os._exit(0)
        except BaseException as failure:
            print(repr(failure), flush=True)
            os._exit(1)
    return child


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def die_at(count: int) -> None:
    """From now on, the process kills itself just before its count-th operation on files."""
    left = count

    def hook(event: str, _: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or (event.startswith("os.") and event != "os.kill"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_everywhere(base: Path) -> None:
    """A write is killed before each of its operations in turn; prints how many there were."""
    for step in (10, 20):  # the step before, and the same step
        earlier = make_checkpoint(step, versions=(9,), text="earlier")
        later = make_checkpoint(20, versions=(9, 10))
        start = base / f"{step}"
        open_folder(start)[0].write(earlier)
        count, killed = 0, True
        while killed:
            count += 1
            folder = base / f"{step}-{count}"
            shutil.copytree(start, folder)

            def job(folder: Path = folder, later: Checkpoint = later, at: int = count) -> None:
                checkpoints, _ = open_folder(folder, keep=1)
                die_at(at)
                checkpoints.write(later)

            killed = was_killed(in_child(job))
            checkpoints, said = open_folder(folder, keep=1)
            found = checkpoints.newest()
            assert found is not None and not said, said
            assert essence(found) in ((essence(earlier), essence(later)) if killed else (essence(later),))
            checkpoints.write(make_checkpoint(30, versions=(10,)))  # and the folder is as good as new
            assert names(folder) == ["step-000030"]
        print(count, flush=True)


def kill_at_random(base: Path, kills: int) -> None:
    """Children write one checkpoint after another, in one folder, until they are killed; prints the steps found."""
    chance = random.Random(7)
    step = 0
    for _ in range(kills):
        inlet, outlet = os.pipe()

        def job(first: int = step + 1, outlet: int = outlet) -> None:
            checkpoints, _ = open_folder(base, keep=2)
            for step in range(first, first + 10_000):
                checkpoints.write(make_checkpoint(step, versions=(max(0, step - 1), step)))
                os.write(outlet, b"%d\n" % step)

        child = in_child(job)
        os.close(outlet)
        said_steps = os.read(inlet, 64)
        time.sleep(chance.random() * 0.1)
        os.kill(child, signal.SIGKILL)
        assert was_killed(child)
        while more := os.read(inlet, 4096):
            said_steps += more
        os.close(inlet)
        found = open_folder(base)[0].newest()
        assert found is not None
        assert found.step >= int(said_steps.split()[-1])
        assert essence(found) == essence(make_checkpoint(found.step, versions=(max(0, found.step - 1), found.step)))
        step = found.step
        print(step, flush=True)


def kill(everywhere: Path, at_random: Path, kills: int) -> None:
    kill_everywhere(everywhere)
    kill_at_random(at_random, kills)


def run_apart(call: str) -> list[int]:
    """The numbers that a call of this module prints in a fresh process."""
    command = [sys.executable, "-c", f"from pathlib import Path; from tests import test_checkpoint as t; t.{call}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [int(line) for line in done.stdout.split()]


@posix
@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    folders = f"Path({str(tmp_path / 'everywhere')!r}), Path({str(tmp_path / 'random')!r})"
    replaced, added, *steps = run_apart(f"kill({folders}, kills=10)")
    assert min(replaced, added) > 15
    assert len(steps) == 10
    assert steps == sorted(set(steps))

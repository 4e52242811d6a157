"""Tiny runs for tests: in this process by the command line's own `main`, or in a process of their own."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from estr_lite.cli import main
from estr_lite.config import Config, Evaluation, Log, Resources
from estr_lite.rollout.engine import Sampling
from estr_lite.staleness import Fixed, Staleness
from estr_lite.train import train
from tests.lab import SCRATCH

ROOT = Path(__file__).parents[1]
TINY = (
    *("--steps", "2", "--prompts", "2", "--sampling.rollouts", "2", "--evaluation.problems", "0"),
    *("--log.tensorboard", "false", "--engine", "transformers", "--resources.engine_process", "shared"),
)
"""Flags of a run of a second or two; later flags win."""


def call(*argv: object) -> int:
    """The exit code of a command in this process."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in argv])
        raise SystemExit(0)
    return int(end.value.code or 0)


def scratch(pid: int) -> list[Path]:
    """What a process has left of its scratch folders, but for those of the session's own labs."""
    places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    found = {path for place in places if place.is_dir() for path in place.glob(f"estr-lite-{pid}-*")}
    return sorted(found - SCRATCH)


@contextmanager
def process(*argv: object, code: str = "") -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, whose whole family is gone at the end, whatever happens."""
    start = ["-c", code] if code else ["-m", "estr_lite"]
    running = subprocess.Popen(
        [sys.executable, *start, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield running
    finally:
        if family(running):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def family(running: subprocess.Popen[str]) -> bool:
    """Whether any process of that session is left, zombies that nobody waited for included."""
    try:
        os.killpg(running.pid, 0)
    except ProcessLookupError:
        return False
    return True


def end(running: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """Wait for a process: its exit code, its output and its errors."""
    output, errors = running.communicate(timeout=seconds)
    return running.returncode, output, errors


def wait_for(ready: Callable[[], bool], running: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until something is so, while the process lives."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)


@cache
def tiny_run() -> Path:
    """A run that several tests read: three steps of lag 1, every adapter and every rollout kept."""
    folder = Path(tempfile.mkdtemp(prefix="estr-lite-test-")) / "run"
    atexit.register(shutil.rmtree, folder.parent)
    config = Config(
        staleness=Staleness(Fixed(1), Fixed(0)),
        sampling=Sampling(rollouts=4),
        engine="transformers",
        resources=Resources(engine_process="shared"),
        evaluation=Evaluation(problems=16, samples=2),
        log=Log(adapters_every=1, rollouts_every=1),
        prompts=4,
        steps=3,
        run=str(folder),
    )
    train(config, Console(quiet=True), "")
    return folder


def one_line(errors: str, command: str) -> str:
    """The one line that an error is told in, without the libraries' own chatter."""
    assert "Traceback" not in errors, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("estr-lite")]
    assert line.startswith(f"estr-lite {command}: error: "), line
    return line

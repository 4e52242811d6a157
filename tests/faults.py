"""Kills and faults, and what a run makes of them: the checks of `python -m tests.benchmarks.faults`.

Every run is the command line's own `main` in a process that is forked after the imports, so that a kill costs two
seconds and not ten. Call this from a process that has never computed anything: a fork inherits no threads.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estr_lite.cli import main
from tests.faulty_engine import Fault, Kind, inject
from tests.runs import scratch

TINY = (
    *("--steps", "8", "--prompts", "4", "--sampling.rollouts", "4", "--sampling.max_tokens", "16"),
    *("--evaluation.problems", "0", "--checkpoint.every", "2", "--optim.lr", "1e-2", "--log.tensorboard", "false"),
    *("--engine", "transformers", "--log.rollouts_every", "1", "--log.rollouts_groups", "4"),
)
STEPS = 8
CONTROLLED = (*("--staleness.inter", "HeavyTail", "--staleness.intra", "Fixed", "--staleness.intra.steps", "1"),)
LIVE = tuple(
    ("--mode", "Live", "--mode.swap", swap, "--mode.at_bound", bound, "--mode.max_lag", "2")
    for swap in ("keep", "recompute", "drain")
    for bound in ("wait", "drop")
)
OWN, SHARED = (("--resources.engine_process", where) for where in ("own", "shared"))
PATIENCE = 90.0
"""Seconds after which a run counts as hanging."""
GRACE = 5.0
"""Seconds within which a fault must be seen once its bound is over, and within which a family must be gone."""


# runs


@dataclass(frozen=True)
class Launched:
    """A command in a process of its own, the leader of its session."""

    pid: int
    output: Path

    @property
    def over(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def over_within(self, seconds: float) -> bool:
        return _until(lambda: self.over, seconds)

    def wait(self, seconds: float) -> int | None:
        """The exit code; None, and a kill, where it takes longer."""
        if not self.over_within(seconds):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End this one process, not its family."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    @property
    def family_left(self) -> bool:
        """Whether any process of its session outlives the grace; if so, it is ended."""
        if _until(lambda: not _members(self.pid), GRACE):
            return False
        os.killpg(self.pid, signal.SIGKILL)
        return True

    def said(self, words: str) -> list[float]:
        """When lines with these words were printed."""
        stamped = [line.split(" ", 1) for line in self.output.read_text("utf-8").splitlines()]
        return [float(line[0]) for line in stamped if len(line) == 2 and words in line[1]]


class Stamped:
    """A text stream that says of every line when it was begun, on the monotonic clock."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._fresh = descriptor, True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            stamp = f"{time.monotonic():.3f} " if self._fresh else ""
            os.write(self._descriptor, f"{stamp}{line}".encode())
            self._fresh = line.endswith("\n")
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor

    encoding = "utf-8"


def launch(argv: Sequence[object], output: Path, before: Callable[[], None] = lambda: None) -> Launched:
    """Start a command of estr-lite; `before` is called in its process first."""
    pid = os.fork()
    if pid:
        return Launched(pid, output)
    code = 1
    try:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(file, number)
        os.environ["COLUMNS"] = "1000"  # no line is wrapped
        sys.stdout, sys.stderr = Stamped(1), Stamped(2)  # pyright: ignore[reportAttributeAccessIssue]
        before()
        main([str(argument) for argument in argv])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _members(session: int) -> list[int]:
    """The living processes of a session."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def _until(so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# kills

CONFIG, EVENTS = "config.yaml", "events.jsonl"
LENGTHS: dict[tuple[str, object], float] = {}
"""Seconds from the first of that file to the end of a run with its engine there (own, shared)."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL at a moment (0 to 1) of the training, or of the `whole` run from its configuration on."""

    argv: tuple[object, ...]
    folder: Path
    moment: float
    whole: bool
    live: bool
    """Then the books must balance; else the run must leave what one without a kill leaves."""

    def __str__(self) -> str:
        how = f"live {self.argv[-7]} {self.argv[-5]}" if self.live else "controlled"
        return f"{how}, {self.argv[-1]}"


@dataclass(frozen=True)
class Killed:
    """What came of a run that was killed and resumed."""

    code: int | None
    """Exit code of the resumed run; None where it hung."""
    at: int
    """Steps that were done when the kill came."""
    orphan: bool
    litter: bool
    right: bool
    """Ended, and identical or balanced."""

    @property
    def well(self) -> bool:
        return self.right and not self.orphan and not self.litter

    def __str__(self) -> str:
        return f"after {self.at} steps, {'well' if self.well else repr(self)}"


def kill_and_resume(kill: Kill, expected: tuple[bytes, str]) -> Killed:
    """Kill and resume; a run that was over by then is started again with an earlier moment.

    How long a run takes is what it took the last time.
    """
    run, moment = kill.folder / "run", kill.moment
    where = CONFIG if kill.whole else EVENTS
    key = (where, kill.argv[-1])
    while True:
        shutil.rmtree(kill.folder, ignore_errors=True)
        kill.folder.mkdir()
        started = launch(["train", *kill.argv, "--run", run], kill.folder / "train.txt")
        began = _begun(started, run / where)
        started.over_within(moment * LENGTHS.get(key, 1.0))
        if not started.over:
            break
        LENGTHS[key] = time.monotonic() - began
        started.wait(0)
        moment *= 0.8
    started.kill()
    at = len(_events(run, "step"))
    orphan = started.family_left
    resumed = launch(["resume", run], kill.folder / "resume.txt")
    code = resumed.wait(PATIENCE)
    orphan |= resumed.family_left
    right = code == 0 and (balanced(run) if kill.live else leavings(run) == expected)
    return Killed(code, at, orphan, bool(scratch(started.pid) + scratch(resumed.pid)), right)


def leavings(run: Path) -> tuple[bytes, str]:
    """What must be the same: the final adapter's file, and the metrics but for times."""
    adapter = (run / "adapters" / str(STEPS) / "adapter_model.safetensors").read_bytes()
    with (run / "metrics.csv").open() as file:
        rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]
    return adapter, json.dumps(rows)


def balanced(run: Path) -> bool:
    """Whether the books add up, and agree with the completions that the run wrote down as trained."""
    books = json.loads((run / "ledger.json").read_text())
    ends = ("trained", "masked", "dropped", "queued", "in_flight")
    rows = [json.loads(line) for path in (run / "rollouts").glob("*.jsonl") for line in path.read_text().splitlines()]
    kept = sum(sum(row["keep"]) for row in rows)
    steps = [event["step"] for event in _events(run, "step")]
    return (
        books["generated"] == sum(books[name] for name in ends)
        and books["trained"] == kept
        and books["trained"] + books["masked"] == sum(len(row["token_ids"]) for row in rows)
        and steps == list(range(STEPS))
    )


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}\n")]
    return [event for event in events if event["event"] == kind]


def undisturbed(argv: Sequence[object], folder: Path) -> Path:
    """The same run without a kill; how long its parts take is noted."""
    folder.mkdir()
    run = folder / "run"
    started = launch(["train", *argv, "--run", run], folder / "train.txt")
    began = {where: _begun(started, run / where) for where in (CONFIG, EVENTS)}
    code = started.wait(PATIENCE)
    if code != 0:
        raise RuntimeError(f"the run without faults ended with {code}: {started.output.read_text()}")
    LENGTHS.update({(where, argv[-1]): time.monotonic() - at for where, at in began.items()})
    return run


def _begun(started: Launched, file: Path) -> float:
    """When the run has written the first of that file."""
    if not _until(lambda: (file.exists() and file.stat().st_size > 0) or started.over, PATIENCE):
        raise RuntimeError(f"{file} is not written: {started.output.read_text()}")
    return time.monotonic()


# engine faults


@dataclass(frozen=True)
class Case:
    """A fault, and whether there are restarts enough to get over it."""

    kind: Kind
    survives: bool
    step: int

    def __str__(self) -> str:
        return f"{self.kind} at engine step {self.step}, {'one restart' if self.survives else 'no restart left'}"


@dataclass(frozen=True)
class Handled:
    """How a run took a fault."""

    well: bool
    """Seen within the grace after the bound; then gone on to the same adapter, or ended with the cause."""
    seconds: float
    """Until it was seen, beyond the bound."""
    hang: bool
    orphan: bool

    def __str__(self) -> str:
        return f"{'handled' if self.well else 'NOT handled'}, seen after {self.seconds:.2f} s"


CAUSES: dict[Kind, str] = {
    "exception": "the kernel gave up",
    "death": "was killed by signal 9",
    "hang": "gave no sign of life",
    "memory": "out of memory",
    "start": "the weights cannot be read",
}
HEARTBEAT = 3.0


def cases(count: int, rng: random.Random) -> list[Case]:
    """Every kind in both ways, in turn."""
    kinds: list[tuple[Kind, bool]] = [(k, s) for s in (True, False) for k in ("exception", "death", "hang", "memory")]
    kinds.append(("start", False))
    return [Case(*kinds[i % len(kinds)], rng.randrange(1, 8)) for i in range(count)]


def engine_fault(case: Case, folder: Path, expected: tuple[bytes, str]) -> Handled:
    """A controlled run with its engine in a process of its own, which has a fault."""
    folder.mkdir()
    run, fault = folder / "run", Fault(case.kind, case.step, 1 if case.survives else 2, str(folder / "faults"))
    flags = (*OWN, "--watch.heartbeat", HEARTBEAT, "--watch.restarts", 1)
    started = launch(["train", *TINY, *CONTROLLED, *flags, "--run", run], folder / "train.txt", lambda: inject(fault))
    code = started.wait(PATIENCE)
    ended = time.monotonic()
    seen = started.said("Starting it again") if case.survives else started.said("estr-lite train: error")
    bound = HEARTBEAT if case.kind == "hang" else 0.0
    late = (seen[-1] if seen else ended) - fault.moments[-1] - bound
    if case.survives:
        right = code == 0 and leavings(run) == expected
    else:
        right = code == 1 and CAUSES[case.kind] in " ".join(started.output.read_text().split())
    return Handled(right and -0.1 < late < GRACE, late, code is None, started.family_left)

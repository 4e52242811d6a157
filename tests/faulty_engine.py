"""The real embedded engine, in its own process, with a fault at a chosen step: what a child calls to build it.

The environment variable ESTR_LITE_FAULT says which, as the JSON of a `Fault`; a process counts its faults in a file,
so that the engine that takes its place goes on counting.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from estr_lite import build
from estr_lite.rollout.engine import Advance, Engine
from estr_lite.rollout.serve import transformers_engine

VARIABLE = "ESTR_LITE_FAULT"
Kind = Literal["exception", "death", "hang", "memory", "start"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        kind: an exception, a SIGKILL (as the kernel's when memory is short), a step that never returns, an allocation
            that fails, or an engine that cannot be built.
        step: engine step at which it happens, counted in each process from 0.
        times: how many processes it befalls, one after the other.
        log: file that gets the moment of each fault, a line of monotonic seconds.
    """

    kind: Kind
    step: int
    times: int
    log: str

    @property
    def moments(self) -> list[float]:
        path = Path(self.log)
        return [float(line) for line in path.read_text().split()] if path.exists() else []


def inject(fault: Fault) -> None:
    """Engines that are started from here on, in processes of their own, have the fault."""
    os.environ[VARIABLE] = json.dumps(asdict(fault))
    build.BUILDERS["transformers"] = f"{__name__}.faulty_engine"


def faulty_engine(spec: Mapping[str, Any]) -> Engine:
    """The engine, whose step goes wrong when its time has come."""
    fault = Fault(**json.loads(os.environ[VARIABLE]))
    if len(fault.moments) >= fault.times:
        return transformers_engine(spec)
    if fault.kind == "start":
        _note(fault)
        raise OSError("the weights cannot be read")
    engine = transformers_engine(spec)
    steps, real = 0, engine.step

    def step(latest: int) -> Advance:
        nonlocal steps
        steps += 1
        if steps > fault.step:
            _note(fault)
            _befall(fault)
        return real(latest)

    engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def _note(fault: Fault) -> None:
    with Path(fault.log).open("a") as file:
        file.write(f"{time.monotonic()}\n")


def _befall(fault: Fault) -> None:
    match fault.kind:
        case "exception":
            raise RuntimeError("the kernel gave up")
        case "death":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1e6)
        case "memory":
            torch.empty(1 << 55)
        case "start":
            raise AssertionError("an engine that was built cannot fail to start")

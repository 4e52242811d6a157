"""What the benchmarks share: their arguments, medians with their spread, and the JSON object that ends each."""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Sequence
from statistics import median
from typing import Any


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark has; the page's docstring is its help."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="less than a minute, less exact")
    return found


def spread(name: str, values: Sequence[float]) -> dict[str, float | list[float]]:
    """The median of repeated measurements under `name`, and the smallest and largest beside it."""
    return {name: median(values), f"{name}_spread": [min(values), max(values)]}


def report(quick: bool, **values: Any) -> None:
    """Print the result as the last line."""
    print(json.dumps({"quick": quick, **values}, allow_nan=False), flush=True)


def quiet() -> None:
    """Keep other libraries' start-up chatter off the screen."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(lightning|transformers|torch|vllm)\b.*")


def run_module(name: str, *arguments: str) -> dict[str, Any]:
    """Run another benchmark in a process of its own, showing what it prints; its result.

    Raises:
        RuntimeError: if it could not measure.
    """
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if last:
                print(last, flush=True)
            last = line.rstrip("\n")
    if child.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with exit code {child.returncode}: {last}")
    return json.loads(last)

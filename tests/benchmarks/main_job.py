"""The main job as a user runs it: what the default run learns, how long it takes, and what staleness does to δ.

Runs `estr-lite train` without options but a seed, a folder and an engine, once a seed, each in a process of its own.
`base` and `after` are sampled test accuracies. `delta2_by_entropy` is E[δ²] of the trained tokens, binned by the
entropy of the distribution they were sampled from, over all steps past warm-up.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.report import parser, report, spread

QUICK = ("--steps", "9", "--prompts", "4", "--evaluation.problems", "16")
"""A few steps past the default staleness's warm-up."""


def train(seed: int, engine: str, options: Sequence[str], run: Path) -> dict[str, Any]:
    """Train in a process of its own, whose progress shows; the run's summary."""
    command = [sys.executable, "-m", "estr_lite", "train", "--seed", str(seed), "--engine", engine, "--run", str(run)]
    subprocess.run([*command, *options], check=True)
    return json.loads((run / "summary.json").read_text())


def delta2_by_entropy(runs: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Tokens, E[δ²] and share kept of each entropy bin that has tokens, over the runs' steps past warm-up."""
    rows = [row for run in runs for row in csv.DictReader((run / "metrics.csv").open())]
    settled = [row for row in rows if float(row["staleness/warmup"]) == 0]
    found = dict[str, dict[str, float]]()
    for label in [name.removeprefix("bins/tokens_") for name in rows[0] if name.startswith("bins/tokens_")]:
        filled = [row for row in settled if float(row[f"bins/tokens_{label}"])]
        tokens = [float(row[f"bins/tokens_{label}"]) for row in filled]
        if tokens:
            sums = {
                name: sum(n * float(row[f"bins/{name}_{label}"]) for n, row in zip(tokens, filled, strict=True))
                for name in ("delta2", "kept")
            }
            found[label] = {"tokens": sum(tokens), **{name: value / sum(tokens) for name, value in sums.items()}}
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", choices=("auto", "transformers", "vllm"), default="auto")
    arguments.add_argument("--seeds", type=int, default=0, help="runs, seeds 0, 1, …; 3, or 1 with --quick")
    args = arguments.parse_args()
    seeds = range(args.seeds or (1 if args.quick else 3))
    with tempfile.TemporaryDirectory(prefix="estr-lite-main-job-") as folder:
        runs = [Path(folder) / f"seed-{seed}" for seed in seeds]
        found = list[dict[str, Any]]()
        for seed, run in zip(seeds, runs, strict=True):
            print(f"seed {seed}, {len(seeds)} in all", flush=True)
            found.append(train(seed, args.engine, QUICK if args.quick else (), run))
        bins = delta2_by_entropy(runs)
    before, after = [one["before"] for one in found], [one["after"] for one in found]
    print("behaviour entropy    tokens     E[δ²]     kept")
    for label, row in bins.items():
        print(f"{label:17}  {row['tokens']:8.0f}  {row['delta2']:8.4f}  {row['kept']:7.2%}")
    report(
        args.quick,
        engine=found[0]["engine"],
        steps=found[0]["steps"],
        base=median(scores["avg"] for scores in before),
        before=[scores["avg"] for scores in before],
        after=[scores["avg"] for scores in after],
        **spread("gain_median", [100 * (b["avg"] - a["avg"]) for a, b in zip(before, after, strict=True)]),
        greedy_before=[scores["greedy"] for scores in before],
        greedy_after=[scores["greedy"] for scores in after],
        **spread("train_seconds", [one["train_seconds"] for one in found]),
        canary=max(one["canary"] for one in found),
        delta2_by_entropy=bins,
    )


if __name__ == "__main__":
    main()

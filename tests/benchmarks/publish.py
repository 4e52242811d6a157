"""Publish-to-first-token latency: from the end of an optimizer step to the first tokens that the new adapter sampled.

Real live runs with their event logs: `publish` is written when the step has ended, before the adapter is copied and the
canary's probe scored; `segment` when the engine has handed over the tokens of the step in which the new version took a
trajectory over. Both are outside what they bound, so the figure is an upper bound. Prompts a step are few, so that the
trainer is the quicker side and a version finds trajectories in flight; one that found none is counted and left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console

from estr_lite.config import Checkpointing, Config, Evaluation, Log
from estr_lite.modes import Live, Swap
from estr_lite.train import train
from tests.benchmarks.report import parser, quiet, report, spread

SIDES: tuple[tuple[str, Swap], ...] = (
    ("transformers", "keep"),
    ("vllm", "keep"),
    ("transformers", "recompute"),
    ("vllm", "recompute"),
)


def latencies(events: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float], int]:
    """Of every version that took over a trajectory the ms to the swap and to the first token; how many did not."""
    published = {e["version"]: e["time"] for e in events if e["event"] == "publish"}
    swapped = {e["version"]: e["time"] for e in events if e["event"] == "swap"}
    first = dict[int, float]()
    for event in events:
        if event["event"] == "segment" and event["start"] and event["version"] in published:
            first.setdefault(event["version"], event["time"])
    to_swap = [1000 * (swapped[v] - published[v]) for v in sorted(first)]
    return to_swap, [1000 * (first[v] - published[v]) for v in sorted(first)], len(published) - len(first)


def measure(engine: str, swap: Swap, steps: int, prompts: int) -> dict[str, Any]:
    """The latencies of one run."""
    with tempfile.TemporaryDirectory(prefix="estr-lite-publish-") as folder:
        base = Config(
            mode=Live(swap=swap),
            engine=engine,  # pyright: ignore[reportArgumentType]
            prompts=prompts,
            steps=steps,
            evaluation=Evaluation(problems=0),
            checkpoint=Checkpointing(every=10**6),
            log=Log(tensorboard=False, rollouts_groups=0),
        )
        result = train(replace(base, run=str(Path(folder) / "run")), Console(quiet=True))
        events = [json.loads(line) for line in (result.run / "events.jsonl").read_text("utf-8").splitlines()]
    to_swap, to_token, idle = latencies(events)
    found = {
        **spread("median_ms", to_token),
        "p99_ms": quantiles(to_token, n=100, method="inclusive")[98],
        "to_swap_ms": median(to_swap),
        "publishes": len(to_token),
        "nothing_in_flight": idle,
    }
    print(
        f"{engine}, {swap}: {len(to_token)} publishes, first token after {found['median_ms']:.1f} ms (median), "
        f"{found['p99_ms']:.1f} ms (p99); the engine has the adapter after {found['to_swap_ms']:.1f} ms",
        flush=True,
    )
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engines", nargs="+", choices=("transformers", "vllm"), help="default: both, one if quick")
    arguments.add_argument("--steps", type=int)
    arguments.add_argument("--prompts", type=int, default=4)
    args = arguments.parse_args()
    quiet()
    steps = args.steps or (12 if args.quick else 200)
    engines = args.engines or (["transformers"] if args.quick else ["transformers", "vllm"])
    sides = [(engine, swap) for engine, swap in SIDES if engine in engines and (swap == "keep" or not args.quick)]
    per_engine = {f"{engine} {swap}": measure(engine, swap, steps, args.prompts) for engine, swap in sides}
    kept = [one for name, one in per_engine.items() if name.endswith("keep")]
    worst = max(kept, key=lambda one: one["median_ms"])
    report(
        args.quick,
        median_ms=worst["median_ms"],
        p99_ms=worst["p99_ms"],
        steps=steps,
        prompts=args.prompts,
        per_engine=per_engine,
    )


if __name__ == "__main__":
    main()

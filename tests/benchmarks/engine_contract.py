"""How far each engine is from the trainer: the largest differences over several hundred rollouts, in nats.

Cohorts of many versions decode together, at temperatures 1 and 0.7, some without a swap and some with random swaps in
flight, and the trainer scores every token again under the version that its tag names.

`logp_max_error` and `entropy_max_error` are without swaps and with `keep`, against caches as they were, segment by
segment; `keep_max_error` is the swapped part of that. `recompute_max_error` is with `recompute`, against a whole
sequence under each version. `keep_vs_recompute_mean` is no error: it is how much a kept cache moves the
log-probability of a token after the first swap, on average, from that of a recomputed one. `version_tag_errors` counts
tags that are not what the ticket names; that the tags are true is what the errors, measured under them, say.
"""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor

from tests.benchmarks.report import parser, quiet, report, run_module

ENGINES = ("transformers", "vllm")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", choices=ENGINES, help="only this one; default: both, where installed")
    args = arguments.parse_args()
    if args.engine:
        from tests.engine_errors import measure  # not above: the process that only waits needs no torch

        quiet()
        found = measure(args.engine, 1, (0.7,)) if args.quick else measure(args.engine, 6, (1.0, 0.7))
        report(args.quick, **{args.engine: found})
        return
    engines = [engine for engine in ENGINES if engine != "vllm" or importlib.util.find_spec("vllm")]
    options = ["--quick"] if args.quick else []
    with ThreadPoolExecutor() as pool:  # side by side: errors do not depend on how fast they are measured
        found = list(pool.map(lambda engine: run_module("engine_contract", "--engine", engine, *options), engines))
    report(args.quick, **{engine: one[engine] for engine, one in zip(engines, found, strict=True)})


if __name__ == "__main__":
    main()

"""Determinism, byte by byte: the checks of tests/determinism.py on runs twice as long as in the tests.

Compared are the final adapter's file, metrics.csv without its times, and events.jsonl without its times.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.benchmarks.report import parser, quiet, report
from tests.determinism import CHECKS


def main() -> None:
    args = parser(__doc__).parse_args()
    quiet()
    holds, compared = dict[str, bool](), 0
    with tempfile.TemporaryDirectory(prefix="estr-lite-determinism-") as folder:
        for check in CHECKS:
            started = time.monotonic()
            verdict = check(Path(folder) / check.__name__, 4 if args.quick else 12)
            holds[check.__name__] = verdict.holds
            compared += verdict.bytes_compared
            print(f"{check.__doc__} {verdict.holds}, {time.monotonic() - started:.0f} s", flush=True)
    report(args.quick, **holds, bytes_compared=compared)


if __name__ == "__main__":
    main()

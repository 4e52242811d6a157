"""What a run makes of SIGKILL at random moments, and of an engine that fails, dies, hangs or runs out of memory.

Controlled runs that were killed and resumed must end with the adapter and the metrics of a run that was not, byte for
byte; live ones with books that balance. Every tenth run has its engine in a process of its own. Moments are drawn over
the training, in every fifth run over the start as well. An engine's fault must be seen within 5 s of its bound, and be
got over, or end the run with its cause. As many runs as there are cores go on at a time, so seconds are upper bounds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests import faults
from tests.benchmarks.report import parser, quiet, report


def kills(count: int, folder: Path, rng: random.Random) -> Iterator[faults.Kill]:
    """As many kills of controlled runs as of live ones."""
    for live in (False, True):
        for i in range(count):
            mode = faults.LIVE[i % len(faults.LIVE)] if live else faults.CONTROLLED
            where = faults.OWN if i % 10 == 9 else faults.SHARED
            argv = (*faults.TINY, *mode, *where)
            yield faults.Kill(argv, folder / f"kill-{live:d}-{i}", rng.random(), whole=i % 5 == 3, live=live)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, help="of controlled runs, and as many of live ones")
    arguments.add_argument("--engine-faults", type=int)
    arguments.add_argument("--seed", type=int, default=0, help="of the moments")
    args = arguments.parse_args()
    quiet()
    count = args.kills if args.kills is not None else 2 if args.quick else 50
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="estr-lite-faults-") as place:
        folder = Path(place)
        to_kill = list(kills(count, folder, rng))
        cases = faults.cases(args.engine_faults if args.engine_faults is not None else 1 if args.quick else 20, rng)
        whole = faults.undisturbed([*faults.TINY, *faults.CONTROLLED, *faults.SHARED], folder / "whole")
        if any(kill.argv[-1] == faults.OWN[-1] for kill in to_kill):
            faults.undisturbed([*faults.TINY, *faults.CONTROLLED, *faults.OWN], folder / "own")
        expected = faults.leavings(whole)
        killed, handled = list[faults.Killed](), list[faults.Handled]()
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=fork) as pool:
            for i, one in enumerate(pool.map(faults.kill_and_resume, to_kill, [expected] * len(to_kill))):
                killed.append(one)
                print(f"kill {i + 1} of {len(to_kill)}, {to_kill[i]}: {one}", flush=True)
            folders = [folder / f"fault-{i}" for i in range(len(cases))]
            for i, found in enumerate(pool.map(faults.engine_fault, cases, folders, [expected] * len(cases))):
                handled.append(found)
                print(f"fault {i + 1} of {len(cases)}, {cases[i]}: {found}", flush=True)
    report(
        args.quick,
        kills=len(killed),
        controlled_kills=sum(not kill.live for kill in to_kill),
        identical=sum(one.right for kill, one in zip(to_kill, killed, strict=True) if not kill.live),
        live_kills=sum(kill.live for kill in to_kill),
        ledger_balanced=sum(one.right for kill, one in zip(to_kill, killed, strict=True) if kill.live),
        steps_done_at_kill=[one.at for one in killed],
        engine_faults=len(handled),
        engine_handled=sum(one.well for one in handled),
        seen_worst_seconds=round(max((one.seconds for one in handled), default=0.0), 2),
        hangs=sum(one.code is None for one in killed) + sum(one.hang for one in handled),
        orphans=sum(one.orphan for one in killed) + sum(one.orphan for one in handled),
        litter=sum(one.litter for one in killed),
    )


if __name__ == "__main__":
    main()

"""What a run makes of SIGKILL at random moments, and of an engine that fails, dies, hangs or runs out of memory.

Controlled runs that were killed and resumed must end with the adapter and the metrics of a run that was not, byte for
byte; live ones with books that balance. Every fifth run has its engine in a process of its own. Moments are drawn over
the training, in every fifth run over the start as well. An engine's fault must be seen within 5 s of its bound, and be
got over, or end the run with its cause.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from tests import faults
from tests.benchmarks.report import parser, quiet, report


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, help="of controlled runs, and as many of live ones")
    arguments.add_argument("--engine-faults", type=int)
    arguments.add_argument("--seed", type=int, default=0, help="of the moments")
    args = arguments.parse_args()
    quiet()
    kills = args.kills if args.kills is not None else 2 if args.quick else 50
    count = args.engine_faults if args.engine_faults is not None else 1 if args.quick else 20
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="estr-lite-faults-") as place:
        folder = Path(place)
        controlled, live = list[faults.Killed](), list[faults.Killed]()
        handled = list[faults.Handled]()
        identical = balanced = 0
        whole = faults.undisturbed([*faults.TINY, *faults.CONTROLLED, *faults.SHARED], folder / "whole")
        expected = faults.leavings(whole)
        for i in range(kills):
            argv = [*faults.TINY, *faults.CONTROLLED, *(faults.OWN if i % 5 == 4 else faults.SHARED)]
            one = faults.kill_and_resume(argv, folder / f"kill-{i}", rng.random(), whole=i % 5 == 3)
            same = one.code == 0 and faults.leavings(one.run) == expected
            identical += same
            controlled.append(one)
            verdict = "identical" if same else f"NOT identical (exit code {one.code})"
            print(f"kill {i + 1} of {kills}, {argv[-1]}: after {one.at} steps, {verdict}", flush=True)
        for i in range(kills):
            argv = [*faults.TINY, *faults.LIVE[i % len(faults.LIVE)], *(faults.OWN if i % 5 == 4 else faults.SHARED)]
            one = faults.kill_and_resume(argv, folder / f"live-{i}", rng.random(), whole=i % 5 == 3)
            right = one.code == 0 and faults.balanced(one.run)
            balanced += right
            live.append(one)
            verdict = "balanced" if right else f"NOT balanced (exit code {one.code})"
            how = f"{argv[-1]}, {argv[-7]}, {argv[-5]}"
            print(f"live kill {i + 1} of {kills}, {how}: after {one.at} steps, {verdict}", flush=True)
        for i, case in enumerate(faults.cases(count, rng)):
            found = faults.engine_fault(case, folder / f"fault-{i}", expected)
            handled.append(found)
            verdict = "handled" if found.well else "NOT handled"
            print(f"fault {i + 1} of {count}, {case}: {verdict}, seen after {found.seconds:.2f} s", flush=True)
    killed = [*controlled, *live]
    report(
        args.quick,
        kills=len(killed),
        controlled_kills=len(controlled),
        identical=identical,
        live_kills=len(live),
        ledger_balanced=balanced,
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

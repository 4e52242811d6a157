"""The process that an engine lives in: it answers `RemoteEngine`'s messages and ends when its parent does.

`python -m estr_lite.rollout.child CONNECTION LIFELINE`, both inherited file descriptors; the environment variable
ESTR_LITE_ENGINE holds the specification.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Build the engine, say that it is there, serve it."""
    connection, lifeline = map(int, sys.argv[1:])
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # meant for the run as a whole; the parent decides
    from estr_lite.rollout.serve import serve

    serve(connection, json.loads(os.environ["ESTR_LITE_ENGINE"]))


def _end_with_parent(lifeline: int) -> None:
    """Nobody writes to the lifeline: reading ends when the last other end of it is closed."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main()

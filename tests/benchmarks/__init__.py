"""One command for each promised figure: `python -m tests.benchmarks.NAME`, whose last line is one JSON object.

Every figure is measured afresh. Two sides are compared in one run, alternating; times are medians, with the smallest
and the largest beside them. `--quick` takes less than a minute and is less exact.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads OpenMP, as the command line does
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

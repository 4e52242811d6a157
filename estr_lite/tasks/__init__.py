"""Tasks: problems and their graders."""

from estr_lite.tasks.arithmetic import Arithmetic
from estr_lite.tasks.base import Problem, Split, Task, Tokenizer, encode
from estr_lite.tasks.countdown import Countdown
from estr_lite.tasks.jsonl import Jsonl

CATALOGUE: tuple[type[Task], ...] = (Countdown, Arithmetic, Jsonl)

__all__ = ["CATALOGUE", "Arithmetic", "Countdown", "Jsonl", "Problem", "Split", "Task", "Tokenizer", "encode"]

"""Maths problems from JSON Lines files, graded by their final integer.

Reads rows with `question` or `problem` and `answer`; a GSM8K answer's integer stands after its last `####`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from estr_lite.tasks.base import Problem, Split, Task, check_index

_INTEGER = re.compile(r"\$?-?\$?(\d{1,18}|\d{1,3}(,\d{3}){1,5})", re.ASCII)
_LAST_WINDOW = 4096  # characters of a completion that are searched for its answer


@dataclass(frozen=True)
class Jsonl(Task):
    """Problems from two files; every row is checked when the task is built.

    Args:
        train: JSONL file to train on.
        test: JSONL file to evaluate on.
        instruction: text appended to every question.
    """

    train: Path
    test: Path
    instruction: str = "\nGive the final answer after ####."
    _rows: dict[str, list[Problem]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = {"train": self._read(Path(self.train)), "test": self._read(Path(self.test))}
        object.__setattr__(self, "_rows", rows)

    def size(self, split: Split) -> int:
        return len(self._rows[split])

    def problem(self, split: Split, index: int) -> Problem:
        check_index(self, split, index)
        return self._rows[split][index]

    def grade(self, reference: str, completion: str) -> float:
        answer = final_integer(completion[-_LAST_WINDOW:])
        return float(answer is not None and answer == int(reference))

    def _read(self, path: Path) -> list[Problem]:
        if not path.is_file():
            raise FileNotFoundError(f"Jsonl task: there is no file {path}.")
        problems = list[Problem]()
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            where = f"{path}, row {number}"
            try:
                row: object = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}.") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} must be a JSON object, got {type(row).__name__}.")
            fields = cast("dict[str, object]", row)
            question = fields.get("question") or fields.get("problem")
            if not question or not isinstance(question, str):
                raise ValueError(f"{where} has no question: expected a text in 'question' or 'problem'.")
            answer = str(fields.get("answer"))
            integer = final_integer(answer if "####" in answer else f"#### {answer}")
            if integer is None:
                raise ValueError(
                    f"{where} has no answer: expected an integer in 'answer', or '#### integer' at its end."
                )
            problems.append(Problem(f"{path.stem}:{number}", f"{question}{self.instruction}", str(integer)))
        if not problems:
            raise ValueError(f"{path} has no rows.")
        return problems


def final_integer(text: str) -> int | None:
    """The integer after the last `####`, thousands commas and a dollar sign dropped; None where there is none."""
    _, marker, tail = text.rpartition("####")
    match = _INTEGER.fullmatch(tail.strip()) if marker else None
    return int(match[0].replace(",", "").replace("$", "")) if match else None

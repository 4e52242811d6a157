"""Maths files: what counts as an answer, errors that name the row, and the real data sets where they are at hand."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from estr_lite.tasks import Jsonl
from estr_lite.tasks.jsonl import final_integer

REASON = "set ESTR_LITE_DATA to a folder with gsm8k/train.jsonl, gsm8k/test.jsonl and aime2024.jsonl to aime2026.jsonl"
needs_data = pytest.mark.skipif("ESTR_LITE_DATA" not in os.environ, reason=REASON)
GOOD = {"question": "How many?", "answer": "6 * 7 = 42\n#### 42"}


def write(folder: Path, *rows: object, name: str = "rows.jsonl", end: str = "\n") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode())
    return path


def load(path: Path) -> Jsonl:
    return Jsonl(path, path)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("7 + 5 = 12\n#### 12", "12"),
        ("#### 1,234", "1234"),
        ("#### 192,000,000", "192000000"),
        ("#### -5", "-5"),
        ("so $18 it is.\n#### $18", "18"),
        ("#### 1\n#### 2", "2"),
        (204, "204"),
        (0, "0"),
        ("073", "73"),
        (-3, "-3"),
    ],
)
def test_an_answer_is_a_whole_number_or_stands_after_the_last_marker(
    tmp_path: Path, answer: str | int, reference: str
) -> None:
    for field in ("question", "problem"):
        task = load(write(tmp_path, {field: "How many?", "answer": answer}))
        problem = task.problem("train", 0)
        assert problem.reference == reference
        assert problem.text.startswith("How many?") and problem.text.endswith(task.instruction)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"question": "?", "answer": "no number"}, "has no answer"),
        ({"question": "?", "answer": "#### 1.5"}, "has no answer"),
        ({"question": "?", "answer": 1.5}, "has no answer"),
        ({"question": "?", "answer": True}, "has no answer"),
        ({"question": "?", "answer": None}, "has no answer"),
        ({"question": "?"}, "has no answer"),
        ({"answer": 1}, "has no question"),
        ({"question": "", "answer": 1}, "has no question"),
        ({"question": 5, "answer": 1}, "has no question"),
        ("{'question': 1}", "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "must be a JSON object, got list"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_row(tmp_path: Path, row: object, complaint: str) -> None:
    path = write(tmp_path, GOOD, row, GOOD)
    with pytest.raises(ValueError, match=f"rows.jsonl, row 2 {complaint}") as refusal:
        load(path)
    assert str(path) in str(refusal.value)


def test_bytes_that_are_no_text_are_refused_by_file_and_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "\xff", "answer": 1}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2 is not JSON"):
        load(path)


def test_an_empty_and_a_missing_file_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl has no rows"):
        load(write(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nowhere\.jsonl"):
        load(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_row_may_hold_any_character_and_end_as_on_any_system(tmp_path: Path, end: str) -> None:
    strange = "a\u2028b\u0085c\x0bd\x1ce"  # what str.splitlines would split at
    task = load(write(tmp_path, {**GOOD, "question": strange}, GOOD, end=end))
    assert task.size("train") == 2
    assert task.problem("train", 0).text.startswith(strange)


def test_train_and_test_come_from_their_own_files(tmp_path: Path) -> None:
    train = write(tmp_path, GOOD, GOOD, GOOD, name="train.jsonl")
    task = Jsonl(train, write(tmp_path, {**GOOD, "question": "How few?"}, name="test.jsonl"), instruction="!")
    assert (task.size("train"), task.size("test")) == (3, 1)
    assert (task.problem("train", 2).uid, task.problem("test", 0).uid) == ("train:3", "test:1")
    assert task.problem("test", 0).text == "How few?!"
    with pytest.raises(IndexError, match="Jsonl has 1 test problems"):
        task.problem("test", 1)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("6 * 7 = 42\n#### 42", 1),
        ("#### 42\n", 1),
        ("####42", 1),
        ("#### $42", 1),
        ("#### 41, no, #### 42", 1),
        ("#### 42 #### 41", 0),
        ("42", 0),
        ("#### 42 apples", 0),
        ("#### 4,2", 0),
        ("#### 42.0", 0),
        ("#### 6*7", 0),
        ("#### ４２", 0),
        ("#### print(42)", 0),
        ("#### -42", 0),
        ("####", 0),
        ("", 0),
        ("#### " + "9" * 5000, 0),
    ],
)
def test_a_completion_is_graded_by_the_integer_at_its_end(tmp_path: Path, completion: str, reward: int) -> None:
    assert load(write(tmp_path, GOOD)).grade("42", completion) == reward


@pytest.mark.parametrize("piece", ["#### 4", "####", " ", "9", ","])
def test_ten_megabytes_are_graded_in_no_time(tmp_path: Path, piece: str) -> None:
    task, text = load(write(tmp_path, GOOD)), piece * (10_000_000 // len(piece))
    started = time.process_time()
    assert task.grade("42", text) == 0.0
    assert time.process_time() - started < 1.0


@needs_data
def test_every_row_of_gsm8k_loads_and_its_own_solution_is_graded_right() -> None:
    folder = Path(os.environ["ESTR_LITE_DATA"]) / "gsm8k"
    task = Jsonl(folder / "train.jsonl", folder / "test.jsonl")
    assert (task.size("train"), task.size("test")) == (7473, 1319)
    for split in ("train", "test"):
        answers = [json.loads(line)["answer"] for line in (folder / f"{split}.jsonl").open(encoding="utf-8")]
        for index, answer in enumerate(answers):
            assert task.grade(task.problem(split, index).reference, answer) == 1.0


@needs_data
@pytest.mark.parametrize("year", [2024, 2025, 2026])
def test_every_row_of_aime_loads_with_an_answer_of_three_digits_at_most(year: int) -> None:
    task = load(Path(os.environ["ESTR_LITE_DATA"]) / f"aime{year}.jsonl")
    references = [task.problem("test", index).reference for index in range(task.size("test"))]
    assert len(references) == 30 and all(0 <= int(reference) <= 999 for reference in references)
    assert all(final_integer(f"#### {reference}") == int(reference) for reference in references)

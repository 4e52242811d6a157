"""Generated tasks: the same problems by seed, splits that never meet, and graders that take hostile text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estr_lite.tasks import CATALOGUE, Arithmetic, Countdown, Jsonl, Problem, Task, arithmetic, countdown, encode
from estr_lite.tasks.steps import Step, apply, parse
from tests.builders import Characters

GENERATED: list[Countdown | Arithmetic] = [
    Countdown(),
    Countdown(numbers=2, largest=30),
    Countdown(numbers=6, largest=100, largest_target=400, seed=3),
    Arithmetic(),
    Arithmetic(terms=2, largest=60),
    Arithmetic(terms=6, largest=100, seed=3),
]
every_task = pytest.mark.parametrize("task", GENERATED, ids=repr)

HOSTILE = [
    "",
    " ",
    ";",
    ";;;",
    "=",
    "no answer",
    "__import__('os').system('true')",
    "print(1)",
    "(1+2)=3",
    "1e1+2=12",
    "0x10+1=17",
    "1_0+2=12",
    "-1+2=1",
    "1+2==3",
    "1**2=1",
    "1//1=1",
    "1%2=1",
    "1+2=3\n4+5=9",
    "1+2=3,4+5=9",
    "١+٢=٣",  # Arabic digits
    "１+２=３",  # full-width digits
    "²+1=3",
    "1+2=3\x00",
    "9999999+1=10000000",
    "9" * 300,
    "\ud800",
]


def make(task: Task, index: int) -> tuple[Problem, tuple[Step, ...]]:
    module: Callable[..., tuple[Problem, tuple[Step, ...]]] = (
        countdown.make if isinstance(task, Countdown) else arithmetic.make
    )
    return module(task, "train", index)


def test_the_catalogue_is_what_is_tested_here_and_in_test_jsonl() -> None:
    assert set(CATALOGUE) == {type(task) for task in GENERATED} | {Jsonl}


# Problems


@every_task
def test_a_problem_is_the_same_whenever_asked_for_and_another_under_another_seed(task: Countdown | Arithmetic) -> None:
    first = [task.problem("train", i) for i in range(50)]
    assert [task.problem("train", i) for i in reversed(range(50))] == first[::-1]
    assert [replace(task, seed=9).problem("train", i) for i in range(50)] != first


@every_task
def test_train_and_test_never_share_a_problem(task: Task) -> None:
    train = {task.problem("train", i).uid for i in range(4000)}
    test = {task.problem("test", i).uid for i in range(512)}
    assert train and test and not train & test


@every_task
def test_an_index_outside_the_split_is_refused(task: Task) -> None:
    for index in (-1, task.size("test")):
        with pytest.raises(IndexError, match=f"has 512 test problems, there is no number {index}"):
            task.problem("test", index)


@every_task
def test_the_steps_that_made_a_problem_solve_it(task: Task) -> None:
    for index in range(300):
        problem, steps = make(task, index)
        answer = ";".join(map(str, steps))
        assert parse(answer) == steps
        assert task.grade(problem.reference, answer) == task.grade(problem.reference, f" {answer}\n") == 1.0


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Countdown(numbers=1), "Countdown.numbers"),
        (lambda: Countdown(largest=101), "Countdown.largest"),
        (lambda: Countdown(largest_target=0), "Countdown.largest_target"),
        (lambda: Countdown(train_size=0), "Countdown.train_size"),
        (lambda: Arithmetic(terms=7), "Arithmetic.terms"),
        (lambda: Arithmetic(largest=1), "Arithmetic.largest"),
        (lambda: Arithmetic(test_size=0), "Arithmetic.test_size"),
    ],
)
def test_a_bad_parameter_is_refused_by_class_and_field(build: Callable[[], Task], field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        build()


def test_so_few_problems_that_none_is_left_for_the_test_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"Countdown\.largest = 2 gives too few problems, none of them for the test"):
        Countdown(numbers=2, largest=2)


def test_a_prompt_goes_through_the_chat_template_where_the_tokenizer_has_one() -> None:
    problem = Problem("u", "1+2:", "3")
    chat = Characters()
    chat.chat_template = "<>"
    assert encode(problem, Characters()).token_ids == tuple(map(ord, "1+2:"))
    assert encode(problem, chat).token_ids == tuple(map(ord, "<1+2:>"))


# Graders


@pytest.mark.parametrize(
    "answer",
    [
        "18*3=30;30+12=42",  # wrong arithmetic in a step
        "18*3=54;54-12=41",  # and in the last one
        "18*3=55;55-13=42",  # wrong, and a number that was not given
        "18*3=54",  # does not use 12
        "12+30=42",  # 30 was not given
        "18*3=54;54-12=42;42+0=42",  # 0 was not given
        "18+12=30;30+12=42",  # 12 twice, 3 never
        "18*3=54;54-12=42;",  # right but for what follows
        "18*3=54;54-12=42 done",
        "so 18*3=54;54-12=42",
        "１８*3=54;54-12=42",  # full-width digits
        "42",
    ],
)
def test_countdown_takes_a_right_answer_and_nothing_that_is_nearly_one(answer: str) -> None:
    task, reference = Countdown(), "18,3,12>42"
    assert task.grade(reference, "18*3=54;54-12=42") == task.grade(reference, "3*18=54;54-12=42") == 1.0
    assert task.grade(reference, answer) == 0.0


@pytest.mark.parametrize(
    "answer", ["7+12=19;19-3=15", "7+12=18;18-2=16", "7+12=19", "15", "16x", "16.0", "+16", "16;", "１６", "٧+9=16"]
)
def test_arithmetic_takes_the_steps_or_the_bare_answer_and_nothing_wrong(answer: str) -> None:
    task, reference = Arithmetic(), "16"
    assert all(task.grade(reference, right) == 1.0 for right in ("7+12=19;19-3=16", "16", " 16\n"))
    assert task.grade(reference, answer) == 0.0


@every_task
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_text_is_graded_0_and_never_raises(task: Task, text: str) -> None:
    assert task.grade(make(task, 0)[0].reference, text) == 0.0


@every_task
@given(text=st.text(alphabet=st.one_of(st.sampled_from("0123456789+-*/=;,> "), st.characters()), max_size=60))
def test_no_text_makes_a_grader_raise_or_leave_0_and_1(task: Task, text: str) -> None:
    assert task.grade(make(task, 0)[0].reference, text) in (0.0, 1.0)


@every_task
@pytest.mark.parametrize("piece", ["9", "1+1=2;", ";", " ", "(", "é"])
def test_ten_megabytes_are_graded_in_no_time(task: Task, piece: str) -> None:
    text, reference = piece * (10_000_000 // len(piece)), make(task, 0)[0].reference
    started = time.process_time()
    assert task.grade(reference, text) == 0.0
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("left", "operator", "right", "result"),
    [
        *((6, "+", 3, 9), (6, "*", 3, 18), (6, "-", 3, 3), (3, "-", 6, None)),
        *((6, "/", 3, 2), (7, "/", 3, None), (1, "/", 0, None), (6, "^", 3, None)),
    ],
)
def test_steps_are_exact_integer_arithmetic(left: int, operator: str, right: int, result: int | None) -> None:
    assert apply(left, operator, right) == result

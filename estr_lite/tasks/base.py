"""What a task is: problems by index, deterministic by seed, and an exact grader.

Model output is hostile text. A grader parses it; nothing here ever evaluates it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from estr_lite.types import Prompt

Split = Literal["train", "test"]

MAX_TRIES = 100_000
"""Draws after which a generated task gives up looking for a problem of a split (one draw in ten is a test problem)."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the lab uses."""

    chat_template: Any

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], /, **options: Any) -> Any: ...

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class Problem:
    """A question as text, with the reference its grader judges by."""

    uid: str
    text: str
    reference: str


class Task(ABC):
    """Problems of two disjoint splits and their grader; a task holds no randomness but its own seed."""

    waits = False
    """Whether a grade waits for something outside, a tool or a sandbox: then every rollout's is asked for at once, each
    in a thread of its own, while the engine goes on."""

    @abstractmethod
    def size(self, split: Split) -> int:
        """How many problems the split has."""

    @abstractmethod
    def problem(self, split: Split, index: int) -> Problem:
        """Problem `index` of the split, always the same one; IndexError outside 0..size-1."""

    @abstractmethod
    def grade(self, reference: str, completion: str) -> float:
        """1.0 for a right answer, 0.0 for anything else, whatever the text."""


def encode(problem: Problem, tokenizer: Tokenizer) -> Prompt:
    """The prompt's tokens: through the chat template where the tokenizer has one, as they are otherwise."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": problem.text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer.encode(problem.text, add_special_tokens=False)
    return Prompt(problem.uid, tuple(ids), problem.reference)


def check_index(task: Task, split: Split, index: int) -> None:
    """Raise IndexError unless `index` names a problem of the split."""
    if not 0 <= index < task.size(split):
        raise IndexError(f"{type(task).__name__} has {task.size(split)} {split} problems, there is no number {index}.")

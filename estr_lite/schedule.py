"""Which problem goes to which (step, slot): an endless, seeded walk over the train split, and the tickets of a step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from estr_lite.seeds import derive
from estr_lite.staleness import Staleness, rollout_seed, ticket
from estr_lite.tasks.base import Task, Tokenizer, encode
from estr_lite.types import Prompt, Segment, Ticket


@dataclass(frozen=True)
class Schedule:
    """Tickets as a pure function of (step, slot): every problem once an epoch, reshuffled each epoch.

    Args:
        task: where the problems come from.
        tokenizer: turns them into tokens.
        staleness: which versions sample.
        prompts: groups a step.
        seed: of everything drawn here.
        longest: most tokens that a prompt may have, the context less the completion.
    """

    task: Task
    tokenizer: Tokenizer
    staleness: Staleness
    prompts: int
    seed: int
    longest: int

    def tickets(self, step: int) -> tuple[Ticket, ...]:
        """The step's tickets, one a slot."""
        return tuple(self._ticket(step, slot) for slot in range(self.prompts))

    def live(self, number: int, segments: tuple[Segment, ...]) -> Ticket:
        """Ticket number n of all, with the prompt and the seed that it would have under any law."""
        step, slot = divmod(number, self.prompts)
        return Ticket(step, slot, self._prompt(step, slot), segments, rollout_seed(self.seed, step, slot), False)

    def _ticket(self, step: int, slot: int) -> Ticket:
        return ticket(self.staleness, self.seed, step, slot, self._prompt(step, slot))

    def _prompt(self, step: int, slot: int) -> Prompt:
        size = self.task.size("train")
        epoch, place = divmod(step * self.prompts + slot, size)
        problem = self.task.problem("train", _shuffled(size, derive(self.seed, "epoch", epoch))[place])
        return fit(encode(problem, self.tokenizer), self.longest)


def fit(prompt: Prompt, longest: int) -> Prompt:
    """The prompt, or ValueError where it leaves no room for its completion."""
    if len(prompt.token_ids) > longest:
        raise ValueError(
            f"Prompt {prompt.uid} has {len(prompt.token_ids)} tokens, but only {longest} fit beside the completion "
            "(the model's context less sampling.max_tokens). Shorten the prompt or lower sampling.max_tokens."
        )
    return prompt


@lru_cache(maxsize=2)
def _shuffled(size: int, seed: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return tuple(order)


def cohorts(tickets: tuple[Ticket, ...], most: int) -> list[tuple[Ticket, ...]]:
    """A step's tickets in sets that share their segments, at most `most` tickets each, oldest first version first.

    A cohort is decoded together, so its members and their order are part of the content: they depend on the tickets
    alone.
    """
    plans = sorted({t.segments for t in tickets})
    plans.sort(key=lambda segments: (segments[0].version, segments[-1].version))
    found = list[tuple[Ticket, ...]]()
    for plan in plans:
        members = [t for t in tickets if t.segments == plan]
        found += [tuple(members[i : i + most]) for i in range(0, len(members), most)]
    return found

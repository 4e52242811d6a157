"""Evaluation through the same engines: greedy accuracy, avg@k, and unbiased pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from estr_lite.rollout.engine import Advance, Engine, EngineError, Finished, Sampling
from estr_lite.rollout.mailbox import Mailbox, Stopped
from estr_lite.rollout.source import Planned
from estr_lite.rollout.worker import decode, grade
from estr_lite.schedule import fit
from estr_lite.seeds import derive
from estr_lite.tasks.base import Split, Task, Tokenizer, encode
from estr_lite.types import Segment, Ticket


@dataclass(frozen=True)
class Scores:
    """What a policy scores on a split.

    `half_width` is that of the 95 % interval of `avg` over problems (normal approximation).
    """

    problems: int
    k: int
    greedy: float
    avg: float
    half_width: float
    pass_at_k: float
    truncated: float


def evaluate(
    engine: Engine,
    task: Task,
    tokenizer: Tokenizer,
    sampling: Sampling,
    version: int,
    problems: int,
    longest: int,
    seed: int,
    split: Split = "test",
    progress: Callable[[int, int], None] = lambda done, total: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Scores:
    """Score adapter `version` on the first `problems` problems of a split.

    `sampling.rollouts` completions are sampled a problem at its temperature, and one more greedily. pass@k is over
    those k = `sampling.rollouts` samples.

    Raises:
        Stopped: as soon as `stopped` says so.
        EngineError: where the logits of a completion are not finite.
    """

    def go_on(engine: Engine, latest: int) -> None:
        if stopped():
            raise Stopped

    def rewards(sampling: Sampling, before: int) -> tuple[list[list[float]], float]:
        return _rewards(
            engine, task, tokenizer, tickets, sampling, version, go_on, lambda n: progress(before + n, 2 * count)
        )

    count = min(problems, task.size(split))
    tickets = [_ticket(task, tokenizer, split, i, version, longest, seed) for i in range(count)]
    greedy = replace(sampling, temperature=0.0, rollouts=1)
    sampled, truncated = rewards(sampling, 0)
    best, _ = rewards(greedy, count)
    right = [sum(r == 1.0 for r in rewards) for rewards in sampled]
    k = sampling.rollouts
    means = [c / k for c in right]
    avg = sum(means) / count
    deviation = math.sqrt(sum((m - avg) ** 2 for m in means) / max(1, count - 1))
    return Scores(
        problems=count,
        k=k,
        greedy=sum(r[0] == 1.0 for r in best) / count,
        avg=avg,
        half_width=1.96 * deviation / math.sqrt(count),
        pass_at_k=sum(pass_at_k(k, c, k) for c in right) / count,
        truncated=truncated,
    )


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The unbiased estimate of P(at least one of k is right): 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def _ticket(
    task: Task, tokenizer: Tokenizer, split: Split, index: int, version: int, longest: int, seed: int
) -> Ticket:
    prompt = fit(encode(task.problem(split, index), tokenizer), longest)
    return Ticket(version, index, prompt, (Segment(0, version),), derive(seed, "evaluate", split, index), clamped=False)


def _rewards(
    engine: Engine,
    task: Task,
    tokenizer: Tokenizer,
    tickets: Sequence[Ticket],
    sampling: Sampling,
    version: int,
    before_step: Callable[[Engine, int], None],
    progress: Callable[[int], None],
) -> tuple[list[list[float]], float]:
    """Each ticket's rewards, in order, and the share of completions that ended by length."""
    most = max(1, engine.max_rows // sampling.rollouts)
    cohorts = [tuple(tickets[i : i + most]) for i in range(0, len(tickets), most)]
    ready = Mailbox()
    ready.announce(version)
    found, long = dict[int, list[float]](), 0
    for finished in _all(decode(engine, Planned(cohorts), sampling, ready, before_step)):
        if not all(bool(rollout.logp.isfinite().all()) for rollout in finished.rollouts):
            raise EngineError(
                f"The logits for {finished.ticket.prompt.uid} are not finite: the model or its adapter holds NaN or "
                "infinite weights, or overflows in its dtype."
            )
        group = grade(finished, task, tokenizer)
        found[group.ticket.slot] = [r.reward for r in group.rollouts]
        long += sum(r.finish == "length" for r in group.rollouts)
        progress(len(found))
    return [found[t.slot] for t in tickets], long / (len(tickets) * sampling.rollouts)


def _all(advances: Iterable[Advance]) -> Iterator[Finished]:
    for advance in advances:
        yield from advance.finished

"""A run's configuration: one frozen dataclass, whose defaults are the main job. A YAML states differences from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estr_lite.advantages import Advantage, GroupNormalized
from estr_lite.checks import require_at_least, require_positive
from estr_lite.module import Optim
from estr_lite.objectives import Estr
from estr_lite.objectives.base import Objective
from estr_lite.policy.adapter import Lora
from estr_lite.policy.base import Model
from estr_lite.rollout.engine import Sampling
from estr_lite.staleness import Staleness
from estr_lite.tasks import Countdown, Task

EngineName = Literal["auto", "transformers", "vllm"]


@dataclass(frozen=True)
class Vllm:
    """Options of the vLLM engine.

    Args:
        memory: share of the GPU's memory that vLLM may take; on CPU see `kv_gib`.
        kv_gib: size of the KV cache on CPU, in GiB.
        max_rows: most completions in flight.
        eager: no CUDA graphs and no compilation; slower, starts at once.
    """

    memory: float = 0.45
    kv_gib: float = 1.0
    max_rows: int = 256
    eager: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.memory < 1:
            raise ValueError(f"Vllm.memory must be between 0 and 1, got {self.memory}.")
        require_positive(self, kv_gib=self.kv_gib)
        require_at_least(self, 1, max_rows=self.max_rows)


@dataclass(frozen=True)
class Evaluation:
    """The test before and after training.

    Args:
        problems: test problems; 0 skips the test.
        samples: sampled completions a problem.
    """

    problems: int = 256
    samples: int = 4

    def __post_init__(self) -> None:
        require_at_least(self, 0, problems=self.problems)
        require_at_least(self, 1, samples=self.samples)


@dataclass(frozen=True)
class Log:
    """What the run's folder keeps.

    Args:
        tensorboard: write TensorBoard files beside metrics.csv.
        adapters_every: keep the adapter of every so many steps; the first and the last are always kept.
        rollouts_every: write sampled groups of every so many steps.
        rollouts_groups: groups written then.
    """

    tensorboard: bool = True
    adapters_every: int = 50
    rollouts_every: int = 10
    rollouts_groups: int = 2

    def __post_init__(self) -> None:
        require_at_least(self, 1, adapters_every=self.adapters_every, rollouts_every=self.rollouts_every)
        require_at_least(self, 0, rollouts_groups=self.rollouts_groups)


@dataclass(frozen=True)
class Config:
    """A training run.

    Args:
        model: the frozen base.
        lora: the adapter that is trained.
        task: problems and grader.
        objective: what a token is worth; `estr-lite objectives` lists them.
        advantage: how a group's rewards become advantages.
        staleness: which versions of the adapter sample.
        sampling: how they sample.
        optim: the optimizer step.
        engine: what generates; `auto` takes vLLM on a GPU, and on a CPU from 30 M parameters on, where it is installed.
        vllm: options of the vLLM engine.
        evaluation: the test before and after.
        log: what the run's folder keeps.
        prompts: groups a step.
        steps: training steps.
        seed: of everything random.
        run: folder to write, which must not exist; `auto` names runs/<task>-<objective>-<time>.
    """

    model: Model = Model()
    lora: Lora = Lora()
    task: Task = Countdown()
    objective: Objective = Estr()
    advantage: Advantage = GroupNormalized()
    staleness: Staleness = Staleness()
    sampling: Sampling = Sampling()
    optim: Optim = Optim()
    engine: EngineName = "auto"
    vllm: Vllm = Vllm()
    evaluation: Evaluation = Evaluation()
    log: Log = Log()
    prompts: int = 16
    steps: int = 150
    seed: int = 0
    run: str = "auto"

    def __post_init__(self) -> None:
        require_at_least(self, 1, prompts=self.prompts, steps=self.steps)
        require_at_least(self, 0, seed=self.seed)
        if self.sampling.rollouts < self.advantage.min_group:
            raise ValueError(
                f"sampling.rollouts is {self.sampling.rollouts}, but {type(self.advantage).__name__} compares a "
                f"rollout with its group and needs at least {self.advantage.min_group}."
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature must be above 0 to train, got 0: greedy rollouts do not explore.")
        if self.optim.minibatches > self.prompts:
            raise ValueError(
                f"optim.minibatches is {self.optim.minibatches}, but a step has only {self.prompts} groups (prompts)."
            )

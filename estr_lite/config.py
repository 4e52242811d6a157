"""A run's configuration: one frozen dataclass, whose defaults are the main job. A YAML states differences from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estr_lite.advantages import Advantage, GroupNormalized
from estr_lite.checks import require_at_least
from estr_lite.modes import Controlled, Mode
from estr_lite.module import Optim
from estr_lite.objectives import Estr
from estr_lite.objectives.base import Objective
from estr_lite.policy.adapter import Lora
from estr_lite.policy.base import Model
from estr_lite.rollout.engine import Sampling, Vllm
from estr_lite.rollout.remote import Watch
from estr_lite.staleness import Staleness
from estr_lite.tasks import Countdown, Task

EngineName = Literal["auto", "transformers", "vllm"]


@dataclass(frozen=True)
class Resources:
    """Who computes where.

    Args:
        trainer_cores: CPU cores of the trainer; 0 shares them out.
        engine_cores: CPU cores of the engine; 0 takes the rest.
        engine_process: whether the engine has a process of its own (`own`), or a thread of the trainer's (`shared`).
            `auto` gives it one where processes can be had and there are two cores or more: neither side then waits for
            the other's interpreter, and an engine that hangs can be ended and started again.
    """

    trainer_cores: int = 0
    engine_cores: int = 0
    engine_process: Literal["auto", "own", "shared"] = "auto"

    def __post_init__(self) -> None:
        require_at_least(self, 0, trainer_cores=self.trainer_cores, engine_cores=self.engine_cores)


@dataclass(frozen=True)
class Checkpointing:
    """What a killed run can be resumed from.

    Args:
        every: steps between two checkpoints; one is also written at the start, at the end, and when the run is stopped.
        keep: how many of the newest are kept.
    """

    every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        require_at_least(self, 1, every=self.every, keep=self.keep)


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
        mode: how generation and training share the time.
        staleness: which versions of the adapter sample, in the mode `Controlled`.
        sampling: how they sample.
        optim: the optimizer step.
        engine: what generates; `auto` takes vLLM on a GPU, and on a CPU from 30 M parameters on, where it is installed.
        vllm: options of the vLLM engine.
        resources: who computes where.
        watch: how long to wait for an engine, how often to start it again.
        checkpoint: what a killed run can be resumed from.
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
    mode: Mode = Controlled()
    staleness: Staleness = Staleness()
    sampling: Sampling = Sampling()
    optim: Optim = Optim()
    engine: EngineName = "auto"
    vllm: Vllm = Vllm()
    resources: Resources = Resources()
    watch: Watch = Watch()
    checkpoint: Checkpointing = Checkpointing()
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
        if not isinstance(self.mode, Controlled) and self.staleness != Staleness():
            raise ValueError(
                f"staleness is set, but the mode {type(self.mode).__name__} brings its own versions: leave it out, or "
                "take the mode Controlled."
            )
        if self.optim.minibatches > self.prompts:
            raise ValueError(
                f"optim.minibatches is {self.optim.minibatches}, but a step has only {self.prompts} groups (prompts)."
            )

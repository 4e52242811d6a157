"""Find ESTR's τ from data: the quantile of S = δ²/(H + ε) on near-on-policy rollouts.

The paper's τ is not published anywhere that we could read, so this procedure is ours. Where policy and sampler are one
version apart, nearly every token should be kept: τ is the score that only a share `reject` of those tokens exceeds.
A second, shorter run at the configuration's own staleness then says what that τ would reject there.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from estr_lite.config import Config, Evaluation
from estr_lite.objectives import Clipped, Estr, IcePopRule
from estr_lite.objectives.base import Objective
from estr_lite.objectives.estr import score
from estr_lite.staleness import Fixed, Staleness
from estr_lite.train import train
from estr_lite.types import Correction, Evidence

SHARES = (1e-1, 1e-2, 1e-3, 1e-4)


@dataclass(frozen=True)
class Calibration:
    """τ, how it came about, and what it would do at the configuration's own staleness."""

    tau: float
    reject: float
    tokens: int
    quantiles: dict[str, float]  # share rejected near on-policy -> τ
    rejected_stale: float  # share that τ rejects at the configured staleness
    icepop_stale: float  # share that IcePop's band [0.5, 5] rejects there
    curve_stale: dict[str, float]  # share rejected at the configured staleness -> τ


class _Recorder(Objective):
    """The clipped surrogate without a rule, keeping the scores and log-ratios that it sees."""

    reference = edge = "none"

    def __init__(self, epsilon: float) -> None:
        self._epsilon, self._clip = epsilon, Clipped()
        self._icepop = IcePopRule()
        self.scores: list[Tensor] = []
        self.popped: list[Tensor] = []

    def __repr__(self) -> str:
        return "the clipped surrogate"

    def __call__(self, evidence: Evidence) -> Correction:
        mask = evidence.mask
        self.scores.append(score(evidence.log_ratio, evidence.behavior_entropy, self._epsilon)[mask].double())
        self.popped.append(~self._icepop(evidence).keep[mask])
        return self._clip(evidence)


def calibrate(config: Config, reject: float, console: Console) -> Calibration:
    """Run `config.steps` steps one version apart, then as many at the configured staleness, and read τ off the first.

    Raises:
        ValueError: unless 0 < reject < 1.
        KeyboardInterrupt: where a run was interrupted; its scores are too few to read anything off.
    """
    if not 0 < reject < 1:
        raise ValueError(f"--reject must be between 0 and 1, got {reject}.")
    near, _ = _run(replace(config, staleness=Staleness(Fixed(1), Fixed(0))), console)
    stale, popped = _run(config, console)
    tau = float(near.quantile(1 - reject))
    return Calibration(
        tau=tau,
        reject=reject,
        tokens=len(near),
        quantiles={f"{share:g}": float(near.quantile(1 - share)) for share in SHARES},
        rejected_stale=float((stale > tau).double().mean()),
        icepop_stale=float(popped.double().mean()),
        curve_stale={f"{share:g}": float(stale.quantile(1 - share)) for share in SHARES},
    )


def _run(config: Config, console: Console) -> tuple[Tensor, Tensor]:
    """All scores of a run, and whether IcePop would pop each token."""
    recorder = _Recorder(config.objective.epsilon if isinstance(config.objective, Estr) else Estr().epsilon)
    with tempfile.TemporaryDirectory(prefix="estr-lite-calibrate-") as folder:
        path = str(Path(folder) / "run")
        result = train(replace(config, objective=recorder, evaluation=Evaluation(problems=0), run=path), console, "")
    if result.interrupted:
        raise KeyboardInterrupt
    return _sample(torch.cat(recorder.scores)), torch.cat(recorder.popped)


def _sample(values: Tensor, most: int = 1 << 24) -> Tensor:
    """`Tensor.quantile` takes at most 2^24 values; more are thinned evenly."""
    return values[:: len(values) // most + 1]

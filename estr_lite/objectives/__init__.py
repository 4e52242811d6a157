"""The catalogue: one page a method, each a frozen dataclass that turns `Evidence` into a `Correction`.

Two kinds stand here. A *rule* (`RULES`) has weight 1 and says which tokens count; `Clipped(rule)` puts any of them
under one clipped surrogate, so that runs differ in the rule alone. The others are as their authors publish them.
"""

from __future__ import annotations

from estr_lite.objectives.base import Objective
from estr_lite.objectives.clipped import Clipped, KeepAll, Product, Rule
from estr_lite.objectives.estr import DEFAULT_TAU, Estr, EstrRule
from estr_lite.objectives.grpo import Grpo, ppo_clip_weight
from estr_lite.objectives.icepop import IcePop, IcePopRule
from estr_lite.objectives.kpop import KPop, KPopRule
from estr_lite.objectives.reinforce import Reinforce
from estr_lite.objectives.tis import Tis

RULES: tuple[type[Rule], ...] = (KeepAll, EstrRule, IcePopRule, KPopRule)
"""Every acceptance rule, for `Clipped.rule`."""

CATALOGUE: tuple[type[Objective], ...] = (Reinforce, Grpo, Clipped, Estr, IcePop, KPop, Tis, *RULES)
"""Every objective that can be chosen by name."""

__all__ = [
    "CATALOGUE",
    "DEFAULT_TAU",
    "RULES",
    "Clipped",
    "Estr",
    "EstrRule",
    "Grpo",
    "IcePop",
    "IcePopRule",
    "KPop",
    "KPopRule",
    "KeepAll",
    "Objective",
    "Product",
    "Reinforce",
    "Rule",
    "Tis",
    "ppo_clip_weight",
]

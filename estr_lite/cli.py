"""The command line: `estr-lite train | eval | calibrate | objectives`."""

from __future__ import annotations

import os

# Before torch loads OpenMP: a waiting team must sleep, or engine and trainer starve each other (DESIGN.md, "Cores").
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import difflib
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings
from rich.console import Console
from rich.table import Table

from estr_lite import advantages, objectives, staleness, tasks
from estr_lite.build import Result, score_adapter, train
from estr_lite.calibrate import Calibration, calibrate
from estr_lite.config import Config
from estr_lite.evaluate import Scores
from estr_lite.module import NonFiniteError
from estr_lite.rollout.engine import EngineError
from estr_lite.rollout.mailbox import RolloutError

CLASSES: dict[str, Sequence[type]] = {
    "objective": objectives.CATALOGUE,
    "objective.rule": objectives.RULES,
    "task": tasks.CATALOGUE,
    "advantage": advantages.CATALOGUE,
    "staleness.inter": staleness.LAWS,
    "staleness.intra": staleness.LAWS,
    "staleness.switch": staleness.SWITCHES,
}
"""Options whose value is the name of a class."""
EXPECTED = (ValueError, TypeError, OSError, EngineError, RolloutError, NonFiniteError)
"""Failures that are told in a line; anything else is a defect of ours and shows its traceback."""


class Parser(ArgumentParser):
    """Names the flag, the value and the nearest that would do."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message}{suggestion(message, self)}\n")
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 0, 1 for a failure told in a line, 2 for bad usage, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {"train": _train, "eval": _eval, "calibrate": _calibrate, "objectives": _objectives}
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n\nestr-lite COMMAND --help lists the options of a command.")
        raise SystemExit(0 if argv else 2)
    if argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], commands, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(f"estr-lite: error: there is no command {argv[0]!r}.{hint} Choose from {', '.join(commands)}.\n")
        raise SystemExit(2)
    with _quiet():
        try:
            commands[argv[0]](argv[1:])
        except EXPECTED as failure:
            sys.stderr.write(f"estr-lite {argv[0]}: error: {explain(failure)}\n")
            raise SystemExit(1) from failure


def explain(failure: BaseException) -> str:
    """The failure and what caused it, each once."""
    lines = [str(failure) or type(failure).__name__]
    cause = failure.__cause__
    while cause is not None:
        if str(cause) not in lines[0]:
            lines.append(f"caused by {type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n  ".join(lines)


# the commands


def _train(argv: list[str]) -> None:
    parser = _parser("train", "Train a LoRA adapter on rollouts of the staleness you set. Without options: the main job.")
    namespace = _parse(parser, argv)
    config = _config(parser, namespace)
    console = Console()
    result = train(config, console, parser.dump(namespace))
    console.print(_before_after(result))
    console.print(f"run folder {result.run}", highlight=False)
    if result.interrupted:
        console.print(f"interrupted after step {result.steps} of {config.steps}; adapter {result.steps} is saved")
        raise SystemExit(130)


def _eval(argv: list[str]) -> None:
    parser = _parser("eval", "Score a model, or an adapter on it: greedy, avg@k and unbiased pass@k.")
    parser.add_argument("--adapter", type=Path | None, default=None, help="PEFT folder; without it, the base")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    namespace = _parse(parser, argv)
    scores = score_adapter(_config(parser, namespace), namespace.adapter, Console(stderr=True))
    if namespace.json:
        print(json.dumps({f.name: getattr(scores, f.name) for f in fields(scores)}))
    else:
        Console().print(scores_table({"score": scores}))


def _calibrate(argv: list[str]) -> None:
    parser = _parser(
        "calibrate",
        "Find ESTR's tau for your model and data: the quantile of its score on near-on-policy rollouts "
        "(arXiv 2607.22186 gives no value that we could read; this procedure is ours).",
    )
    parser.add_argument("--reject", type=float, default=1e-3, help="share of near-on-policy tokens to reject")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    namespace = _parse(parser, argv)
    found = calibrate(_config(parser, namespace), namespace.reject, Console(stderr=True))
    if namespace.json:
        print(json.dumps({f.name: getattr(found, f.name) for f in fields(found)}))
    else:
        Console().print(_calibration_table(found))


def _objectives(argv: list[str]) -> None:
    parser = Parser(prog="estr-lite objectives", description="List the objectives, or show one.")
    parser.add_argument("name", nargs="?", default="", help="the objective to show")
    name = parser.parse_args(argv).name
    known = {kind.__name__: kind for kind in objectives.CATALOGUE}
    console = Console()
    if name and name not in known:
        parser.error(f"there is no objective {name!r}.{_nearest(name, known)}")
    if name:
        console.print(known[name].__doc__ or "", markup=False)
        return
    table = Table("objective", "what it does", "parameters", "edge", "source")
    for kind in known.values():
        parameters = ", ".join(f"{f.name}={'' if f.default is f.default_factory else f.default}" for f in fields(kind))  # pyright: ignore
        line = (kind.__doc__ or "").splitlines()[0]
        table.add_row(kind.__name__, line, parameters, kind.edge, kind.reference)
    console.print(table)


# parsing


def _parser(command: str, description: str) -> Parser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = Parser(prog=f"estr-lite {command}", description=description)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file of differences from the defaults")
    parser.add_class_arguments(Config, None)
    return parser


def _parse(parser: Parser, argv: list[str]) -> Namespace:
    """Parse twice: a class chosen in the first pass starts the second with its own defaults.

    In one pass, jsonargparse would carry equally named parameters over from the class that was the default.
    """
    argv = [_spelled(argument, argv[i - 1] if i else "") for i, argument in enumerate(argv)]
    chosen = parser.parse_args(argv)
    paths = {key: chosen[key]["class_path"] for key in CLASSES if key.count(".") == 0 or key.startswith("staleness")}
    if "config" in chosen and chosen.config:
        paths.pop("objective.rule", None)
    changed = {k: {"class_path": path} for k, path in paths.items() if parser.get_default(k)["class_path"] != path}
    parser.set_defaults(changed)
    return parser.parse_args(argv)


def _spelled(argument: str, flag: str) -> str:
    """Refuse a misspelt class name with the nearest right one, before jsonargparse calls it an import path."""
    name, _, value = argument.partition("=") if argument.startswith("--") else (flag, "=", argument)
    names = [kind.__name__ for kind in CLASSES.get(name.removeprefix("--"), ())]
    if names and value and "." not in value and not value.startswith(("{", "[")) and value not in names:
        raise ValueError(f"{name} {value}: there is no such class.{_nearest(value, names)}")
    return argument


def _config(parser: Parser, namespace: Namespace) -> Config:
    """The configuration's own dataclasses; whatever they refuse is told in a line."""
    made: Any = parser.instantiate(namespace)
    return Config(**{f.name: made[f.name] for f in fields(Config)})


def suggestion(message: str, parser: ArgumentParser) -> str:
    """The nearest flag to one that is not known."""
    match = re.search(r"unrecognized arguments?: (\S+)|Option '(\S+)' is not accepted", message)
    if not match:
        return ""
    word = (match[1] or match[2]).split("=")[0]
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for prefix, kinds in CLASSES.items():
        flags += [f"--{prefix}.{f.name}" for kind in kinds for f in fields(kind) if f.init]
    if match[2]:
        flags = sorted({flag.rsplit(".", 1)[-1] for flag in flags})
    return _nearest(word, flags)


def _nearest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(word, list(known), 1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else f" Choose from {', '.join(known)}." if len(known) < 20 else ""


# what is shown


def scores_table(columns: dict[str, Scores]) -> Table:
    """Scores side by side."""
    table = Table("", *columns)
    some = next(iter(columns.values()))
    table.add_row(f"avg@{some.k}, sampled", *(f"{s.avg:.1%} ± {s.half_width:.1%}" for s in columns.values()))
    table.add_row("greedy", *(f"{s.greedy:.1%}" for s in columns.values()))
    table.add_row(f"pass@{some.k}", *(f"{s.pass_at_k:.1%}" for s in columns.values()))
    table.add_row("truncated", *(f"{s.truncated:.1%}" for s in columns.values()))
    table.caption = f"{some.problems} test problems; ± is a 95 % interval over problems"
    return table


def _before_after(result: Result) -> Table | str:
    columns = {"before": result.before, f"after {result.steps} steps": result.after}
    known = {name: scores for name, scores in columns.items() if scores is not None}
    return scores_table(known) if known else f"{result.steps} steps in {result.train_seconds:.0f} s; no test was asked for"


def _calibration_table(found: Calibration) -> Table:
    table = Table("share rejected near on-policy", "tau", title=f"S = δ²/(H + ε) over {found.tokens} tokens")
    for share, tau in found.quantiles.items():
        table.add_row(share, f"{tau:.4g}")
    table.caption = (
        f"suggested: --objective Estr --objective.tau {found.tau:.3g}\n"
        f"at the run's own staleness it rejects {found.rejected_stale:.2%} of tokens; IcePop's band {found.icepop_stale:.2%}"
    )
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep other libraries' start-up chatter off the screen; warnings of ours stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(lightning|transformers|torch|vllm)\b.*")
        yield


if __name__ == "__main__":
    main()

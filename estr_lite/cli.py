"""The command line: `estr-lite train | resume | replay | eval | calibrate | objectives`."""

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
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from pydoc import locate
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings  # pyright: ignore
from rich.console import Console
from rich.table import Column, Table
from transformers.utils.logging import disable_progress_bar

from estr_lite import advantages, modes, objectives, staleness, tasks
from estr_lite.calibrate import Calibration, calibrate
from estr_lite.config import Config
from estr_lite.evaluate import Scores
from estr_lite.ledger import LedgerError
from estr_lite.module import NonFiniteError
from estr_lite.replay import read_trace
from estr_lite.rollout.engine import EngineError
from estr_lite.rollout.mailbox import RolloutError
from estr_lite.run_folder import to_yaml
from estr_lite.train import Result, score_adapter, train

RULE = "objective.rule"
CLASSES: dict[str, Sequence[type]] = {
    "objective": objectives.CATALOGUE,
    RULE: objectives.RULES,
    "task": tasks.CATALOGUE,
    "advantage": advantages.CATALOGUE,
    "mode": modes.CATALOGUE,
    "staleness.inter": staleness.LAWS,
    "staleness.intra": staleness.LAWS,
    "staleness.switch": staleness.SWITCHES,
}
"""Options whose value is the name of a class."""
FAILURES = (EngineError, RolloutError, NonFiniteError, LedgerError, OSError)
"""What is told in a line, as our refusals are (`_deliberate`); anything else is a defect and shows its traceback."""


class Parser(ArgumentParser):
    """Names the flag, the value and the nearest that would do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # the parser of one class: whoever asked it tells, and knows the flag
            super().error(message, ex)
        sys.stderr.write(f"{self.prog}: error: {plain(message, self)}\n")
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 0, 1 for a failed run, 2 for what the configuration refuses, 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {
        "train": _train,
        "resume": _resume,
        "replay": _replay,
        "eval": _eval,
        "calibrate": _calibrate,
        "objectives": _objectives,
    }
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{__doc__}\n\nestr-lite COMMAND --help lists the options of a command.")
        raise SystemExit(0 if argv else 2)
    if argv[0] not in commands:
        near = _nearest(argv[0], commands) or f" Choose from {', '.join(commands)}."
        sys.stderr.write(f"estr-lite: error: there is no command {argv[0]!r}.{near}\n")
        raise SystemExit(2)
    with _quiet():
        try:
            commands[argv[0]](argv[1:])
        except KeyboardInterrupt:
            sys.stderr.write(f"estr-lite {argv[0]}: interrupted\n")
            raise SystemExit(130) from None
        except Exception as failure:
            if not _expected(failure):
                raise
            if isinstance(failure, RolloutError) and failure.__cause__ and not _expected(failure.__cause__):
                traceback.print_exception(failure.__cause__)  # the worker fell over something unforeseen
            sys.stderr.write(f"estr-lite {argv[0]}: error: {explain(failure)}\n")
            raise SystemExit(1) from failure


def explain(failure: BaseException) -> str:
    """The failure and what caused it, each once."""
    lines = [str(failure) or type(failure).__name__]
    cause = failure.__cause__
    while cause is not None:
        if not str(cause) or str(cause) not in lines[0]:
            lines.append(f"caused by {type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n  ".join(lines)


def _expected(failure: BaseException) -> bool:
    return isinstance(failure, FAILURES) or _deliberate(failure)


def _deliberate(failure: BaseException) -> bool:
    """Whether a `raise` of ours refused a value; the same type out of another library is a defect of ours."""
    last = [frame.filename for frame in traceback.extract_tb(failure.__traceback__)][-1:]
    ours = bool(last) and Path(last[0]).is_relative_to(Path(__file__).parent)
    return isinstance(failure, (ValueError, TypeError, OSError, ImportError)) and ours


# the commands


def _train(argv: list[str]) -> None:
    parser = _parser(
        "train", "Train a LoRA adapter on rollouts of the staleness you set. Without options: the main job."
    )
    namespace = _parse(parser, argv)
    _run(_config(parser, namespace), parser.dump(namespace))


def _resume(argv: list[str]) -> None:
    known = Parser(prog="estr-lite resume", description="Go on with a run that was killed or stopped.")
    known.add_argument("run", type=Path, help="the run's folder; its configuration is its own")
    folder = known.parse_args(argv).run
    parser, namespace = _of_run(known, folder, [])
    config = replace(_config(parser, namespace), run=str(folder))
    _refuse_done(known, folder, config)
    _run(config, parser.dump(namespace), again=True)


def _replay(argv: list[str]) -> None:
    description = "Train on the schedule of another run, as its event log has it: same versions, another objective."
    known = Parser(prog="estr-lite replay", description=description, usage="estr-lite replay RUN [options of train]")
    known.add_argument("run", type=Path, help="the folder of the run, live or controlled")
    if not argv or argv[0].startswith("-"):
        known.parse_args(argv)
        known.error("name the run's folder first.")
    folder, own = Path(argv[0]), [word for word in argv[1:] if word.startswith(("--staleness", "--mode"))]
    if own:
        known.error(f"{own[0].partition('=')[0]}: a replay takes its versions from the run that it repeats.")
    trace = read_trace(folder)
    parser, namespace = _of_run(known, folder, ["--run=auto", *argv[1:]])
    config = _config(parser, namespace)
    asked = any(word.partition("=")[0] == "--steps" for word in argv)
    if asked and config.steps > trace.steps:
        known.error(f"--steps: {config.steps} were asked for, but {folder} has the schedule of {trace.steps}.")
    mode = modes.Replay(str(folder), trace.lag, trace.caches)
    steps = min(config.steps, trace.steps)
    config = replace(config, mode=mode, staleness=staleness.Staleness(), steps=steps)
    _run(config, to_yaml(config))


def _of_run(known: Parser, folder: Path, more: list[str]) -> tuple[Parser, Namespace]:
    """The configuration of a run's folder."""
    file = folder / "config.yaml"
    if not file.is_file():
        known.error(f"{folder} has no config.yaml: name the folder of a run.")
    parser = _parser("train", "")
    parser.prog = known.prog
    return parser, _parse(parser, [f"--config={file}", *more])


def _refuse_done(parser: Parser, folder: Path, config: Config) -> None:
    summary = folder / "summary.json"
    if summary.is_file() and json.loads(summary.read_text("utf-8"))["steps"] >= config.steps:
        parser.error(f"{folder} is done: it has all of its {config.steps} steps.")


def _run(config: Config, resolved: str, again: bool = False) -> None:
    """Train, and show how it went."""
    console = Console()
    result = train(config, console, resolved, again=again)
    console.print(_before_after(result))
    console.print(f"run folder {result.run}", highlight=False, markup=False, soft_wrap=True)
    if result.interrupted:
        left = f" To go on: estr-lite resume {result.run}" if result.steps < config.steps else ""
        console.print(
            f"{result.interrupted} after step {result.steps} of {config.steps}; the checkpoint is saved.{left}",
            highlight=False,
            soft_wrap=True,
        )
        raise SystemExit(130 if result.interrupted == "SIGINT" else 0)


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
    parser.add_argument("--reject", type=float, default=1e-4, help="share of near-on-policy tokens to reject")
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
    names = ("objective", "what it does", "parameters", "edge", "source")
    table = Table(*(Column(name, overflow="fold") for name in names))
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
    """Files first, then the classes that flags choose, then the other flags, in whatever order they came.

    A class that is named starts from its own defaults, or from what a file says of that class. Left alone,
    jsonargparse would give it the values of the class it replaces, wherever the names of two parameters agree.
    """
    files, classes, rest = _sorted(argv)
    chosen = dict[str, str]()
    for file in files:
        chosen |= {key: _importable(parser, key, name) for key, name in _classes_in(file).items()}
    parser.set_defaults({key: {"class_path": path} for key, path in chosen.items() if key != RULE})
    flags = list[str]()
    for key, name in classes:
        path = _importable(parser, key, name)
        flags.append(f"--{key}={name if path == chosen.get(key) else json.dumps(_fresh(path), default=str)}")
        chosen[key] = path
    return parser.parse_args([*(f"--config={file}" for file in files), *flags, *rest])


def _sorted(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """The files of `--config`, the choices of classes by name, outer ones first, and all other arguments."""
    files, classes, rest = list[str](), list[tuple[str, str]](), list[str]()
    left = list(argv)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and (name == "config" or name in CLASSES) and (equals or left):
            value = value if equals else left.pop(0)
            if name == "config":
                files.append(value)
                continue
            if not value.startswith(("{", "[", "-")):
                classes.append((name, value))
                continue
            argument = f"--{name}={value}"
        rest.append(argument)
    return files, sorted(classes, key=lambda choice: choice[0].count(".")), rest


def _classes_in(file: str) -> dict[str, str]:
    """The classes that a YAML file (or text) names, by option; what cannot be read is for the parser to refuse."""
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeError):
        text = file
    try:
        tree: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    found = dict[str, str]()
    for key in CLASSES:
        node = tree
        for part in key.split("."):
            node = node.get(part, (node.get("init_args") or {}).get(part)) if isinstance(node, dict) else None
        name = node.get("class_path") if isinstance(node, dict) else node
        if isinstance(name, str):
            found[key] = name
    return found


def _importable(parser: Parser, key: str, name: str) -> str:
    """The import path of a class chosen by name; a misspelt one is refused with the nearest right one."""
    known = {kind.__name__: kind for kind in CLASSES[key]}
    if "." not in name and name not in known:
        parser.error(f"--{key} {name}: there is no such class.{_nearest(name, known)}")
    return _path(known[name]) if name in known else name


def _path(kind: type) -> str:
    """As jsonargparse writes it: from the package that exports the class."""
    package = kind.__module__.rpartition(".")[0]
    exported = getattr(sys.modules.get(package), kind.__name__, None) is kind and package != "estr_lite"
    return f"{package if exported else kind.__module__}.{kind.__name__}"


def _fresh(path: str) -> dict[str, Any]:
    """A class with all its own defaults written out."""
    kind = locate(path)
    if not isinstance(kind, type):
        return {"class_path": path}
    defaults = {name: p.default for name, p in signature(kind).parameters.items() if p.default is not p.empty}
    plain = {name: {"class_path": _path(type(v))} if is_dataclass(v) else v for name, v in defaults.items()}
    return {"class_path": path, "init_args": plain}


def _config(parser: Parser, namespace: Namespace) -> Config:
    """The configuration's own dataclasses; what they refuse is told in a line, by the flag that sets it."""
    try:
        made: Any = parser.instantiate(namespace)
        return Config(**{f.name: made[f.name] for f in fields(Config)})
    except Exception as failure:
        if not _deliberate(failure):
            raise
        parser.error(f"{_flag(namespace, str(failure))}{failure}")


def _flag(namespace: Namespace, message: str) -> str:
    """`--staleness.inter.steps: ` for a message that starts with `Fixed.steps`; nothing where no flag fits."""
    match = re.match(r"(\w+)\.(\w+)\b", message)
    if not match:
        return ""
    owner, name = match[1], match[2]
    sections = {type(f.default).__name__: f"{f.name}." for f in fields(Config)} | {"Config": ""}
    for key in CLASSES:
        spec = namespace.get(key if key != RULE else "objective.init_args.rule")
        if isinstance(spec, Namespace) and spec["class_path"].endswith(f".{owner}") and _refuses(spec, message):
            return f"--{key}.{name}: "
    return f"--{sections[owner]}{name}: " if owner in sections else ""


def _refuses(spec: Namespace, message: str) -> bool:
    """Whether the class says this message to its own arguments: two options may be of one class."""
    try:
        kind: Any = locate(spec["class_path"])
        kind(**spec.get("init_args", Namespace()).as_dict())
    except Exception as failure:
        return str(failure) == message
    return False


def plain(message: str, parser: ArgumentParser) -> str:
    """A message of jsonargparse in the words of the command line, with the nearest to a name that is not known."""
    keys = list(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    paths = re.findall(r"Problem with given class_path '([^']+)'", message)
    text = re.sub(r"""Parser key "[^"]+":\s*|Problem with given class_path '[^']+':\s*""", "", message)
    text = text.partition("\n  - ")[0].strip()
    flag = "--" + ".".join(keys) if keys else ""
    for pattern, retell in RETOLD.items():
        if match := re.fullmatch(pattern, text, re.DOTALL):
            return retell(match, flag, paths[-1] if paths else "", parser)
    return f"{flag}: {text}" if flag else text


def _unknown_option(match: re.Match[str], flag: str, path: str, parser: ArgumentParser) -> str:
    """An option that a class does not have."""
    name = match[1].partition(".")[0]
    kind = locate(path) if path else None
    if kind is None:
        return f"there is no option {name!r}.{_nearest(f'--{name}', _flags(parser))}"
    known = [f"{flag}.{parameter}" for parameter in signature(kind).parameters]  # pyright: ignore[reportArgumentType]
    return f"{flag}.{name}: {kind.__name__} has no such option.{_nearest(f'{flag}.{name}', known, 0.8)}"  # pyright: ignore[reportAttributeAccessIssue]


def _unknown_key(match: re.Match[str], flag: str, path: str, parser: ArgumentParser) -> str:
    """A key of a YAML file that a section does not have."""
    wrong = f"--{match[1]}.{match[2]}"
    return f"there is no option {wrong}.{_nearest(wrong, _flags(parser))}"


def _unknown_flag(match: re.Match[str], flag: str, path: str, parser: ArgumentParser) -> str:
    """A flag that nothing has."""
    return f"{match[0]}.{_nearest(match[1].partition('=')[0], _flags(parser))}"


def _required(match: re.Match[str], flag: str, path: str, parser: ArgumentParser) -> str:
    """What a class must be given."""
    wanted = ", ".join(f"{flag}.{name}" for name in match[1].split(", "))
    return f"{flag} {path.rpartition('.')[2]} needs {wanted} as well."


def _wrong_type(match: re.Match[str], flag: str, path: str, parser: ArgumentParser) -> str:
    names = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    return f"{flag}: expected {names.get(match[1], match[1])}, got {match[2]}."


def _wrong_choice(match: re.Match[str], flag: str, path: str, parser: ArgumentParser) -> str:
    known = [word.strip(" '") for word in match[1].split(",")]
    return f"{flag}: expected one of {', '.join(known)}, got {match[2]}."


RETOLD: dict[str, Callable[[re.Match[str], str, str, ArgumentParser], str]] = {
    r"Option '([^']+)' is not accepted": _unknown_option,
    r"Group '([^']+)' does not accept option '([^']+)'": _unknown_key,
    r"unrecognized arguments?: (\S+).*": _unknown_flag,
    r"the following arguments are required: (.*)": _required,
    r"Expected a <class '(?:\w+\.)*(\w+)'>\. Got value: (.*)": _wrong_type,
    r"Expected a typing\.Literal\[(.*)\]\. Got value: (.*)": _wrong_choice,
}
"""jsonargparse's own messages, whole, and how we put them."""


def _flags(parser: ArgumentParser) -> list[str]:
    """Every flag, those of the classes too."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    return flags + [
        f"--{key}.{name}" for key, kinds in CLASSES.items() for k in kinds for name in signature(k).parameters
    ]


def _nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Which known name was meant, or all of them where none is near and they are few."""
    names = list(known)
    near = difflib.get_close_matches(word, names, 1, cutoff)
    return f" Did you mean {near[0]}?" if near else f" Choose from {', '.join(names)}." if 0 < len(names) < 20 else ""


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
    return (
        scores_table(known) if known else f"{result.steps} steps in {result.train_seconds:.0f} s; no test was asked for"
    )


def _calibration_table(found: Calibration) -> Table:
    table = Table("share rejected near on-policy", "tau", title=f"S = δ²/(H + ε) over {found.tokens} tokens")
    for share, tau in found.quantiles.items():
        table.add_row(share, f"{tau:.4g}")
    table.caption = (
        f"suggested: --objective Estr --objective.tau {found.tau:.3g}\n"
        f"at the run's own staleness it rejects {found.rejected_stale:.2%} of tokens, "
        f"IcePop's band {found.icepop_stale:.2%}"
    )
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep other libraries' start-up chatter off the screen; warnings of ours stay."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(lightning|transformers|torch|vllm)\b.*")
        yield


if __name__ == "__main__":
    main()

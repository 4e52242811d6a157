"""The command line: classes bring their own defaults, what is printed is what runs, and every command does its work."""

from __future__ import annotations

import io
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from estr_lite import advantages, cli, tasks
from estr_lite.config import Config, Evaluation, Log, Resources
from estr_lite.objectives import CATALOGUE, RULES, Clipped, EstrRule, Grpo, IcePopRule, KeepAll
from estr_lite.rollout.engine import Sampling
from estr_lite.run_folder import to_yaml
from estr_lite.staleness import LAWS, SWITCHES, At, Fixed, Geometric, Staleness, Uniform
from estr_lite.tasks import Arithmetic
from estr_lite.train import train
from tests.runs import ROOT, TINY, call, tiny_run

REQUIRED: dict[str, dict[str, float]] = {"EstrRule": {"tau": 3.0}, "KPopRule": {"phi": 0.5}}
"""What has no default must be given."""
CHOICES = [
    *(("objective", kind) for kind in CATALOGUE),
    *(("advantage", kind) for kind in advantages.CATALOGUE),
    *(("task", kind) for kind in tasks.CATALOGUE if kind is not tasks.Jsonl),
    *((f"staleness.{which}", kind) for which in ("inter", "intra") for kind in LAWS),
    *(("staleness.switch", kind) for kind in SWITCHES),
]
every_choice = pytest.mark.parametrize(
    ("option", "kind"), CHOICES, ids=lambda x: x if isinstance(x, str) else x.__name__
)


def parsed(*argv: object) -> Config:
    """The configuration that `estr-lite train` makes of its arguments."""
    parser = cli._parser("train", "")
    return cli._config(parser, cli._parse(parser, [str(argument) for argument in argv]))


def at(config: Config, option: str) -> Any:
    """The value of an option."""
    value: Any = config
    for name in option.split("."):
        value = getattr(value, name)
    return value


def own(kind: Any) -> dict[str, Any]:
    """A class's own defaults."""
    return {f.name: f.default for f in fields(kind) if f.init and f.default is not MISSING}


# classes and their defaults


def test_without_arguments_it_is_the_main_job() -> None:
    assert parsed() == Config()


@every_choice
def test_a_class_chosen_by_flag_has_its_own_defaults(option: str, kind: Any) -> None:
    given = REQUIRED.get(kind.__name__, {})
    flags = [word for name, value in given.items() for word in (f"--{option}.{name}", value)]
    assert at(parsed(f"--{option}", kind.__name__, *flags), option) == kind(**own(kind) | given)


@every_choice
def test_a_class_chosen_in_a_file_has_its_own_defaults(option: str, kind: Any, tmp_path: Path) -> None:
    given = REQUIRED.get(kind.__name__, {})
    tree: Any = {"class_path": kind.__name__, "init_args": given} if given else kind.__name__
    for name in reversed(option.split(".")):
        tree = {name: tree}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    assert at(parsed("--config", tmp_path / "run.yaml"), option) == kind(**own(kind) | given)


@pytest.mark.parametrize("rule", RULES, ids=lambda kind: kind.__name__)
def test_any_rule_goes_under_the_shared_clip(rule: Any) -> None:
    given = REQUIRED.get(rule.__name__, {})
    flags = [word for name, value in given.items() for word in (f"--objective.rule.{name}", value)]
    found = parsed("--objective", "Clipped", "--objective.rule", rule.__name__, *flags).objective
    assert found == Clipped(rule(**own(rule) | given))


def test_the_order_of_flags_does_not_matter() -> None:
    shuffled = (
        "--objective.rule.tau",
        3,
        "--objective.rule",
        "EstrRule",
        "--objective.clip_low=0.1",
        "--objective=Clipped",
    )
    assert parsed(*shuffled).objective == Clipped(EstrRule(3.0), clip_low=0.1)


def test_a_flag_goes_before_a_file_and_a_file_before_a_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "objective: {class_path: Clipped, init_args: {clip_low: 0.05, rule: {class_path: IcePopRule, init_args: "
        "{high: 9}}}}\n"
        "staleness: {inter: {class_path: Uniform, init_args: {high: 3}}}\n"
    )
    assert parsed("--config", file).objective == Clipped(IcePopRule(high=9.0), clip_low=0.05)
    assert parsed("--objective", "Clipped", "--config", file).objective == Clipped(IcePopRule(high=9.0), clip_low=0.05)
    assert parsed("--objective.clip_low", 0.3, "--config", file).objective == Clipped(
        IcePopRule(high=9.0), clip_low=0.3
    )
    assert parsed("--config", file, "--objective.rule", "KeepAll").objective == Clipped(KeepAll(), clip_low=0.05)
    assert parsed("--config", file, "--objective", "Grpo").objective == Grpo()
    assert parsed("--config", file, "--staleness.inter.low", 2).staleness.inter == Uniform(2, 3)


def test_a_class_outside_the_catalogue_goes_by_its_import_path() -> None:
    task = parsed("--task", "tests.failing.FailingTask", "--task.call", 7).task
    assert (type(task).__name__, task.call) == ("FailingTask", 7)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(
            task=Arithmetic(terms=4),
            objective=Clipped(EstrRule(3.0), clip_low=0.1),
            staleness=Staleness(Geometric(2.0), Fixed(1), At((3, 9)), "recompute"),
            sampling=Sampling(0.7, 16, 3),
            log=Log(tensorboard=False),
            run="somewhere",
        ),
    ],
)
def test_a_configuration_written_as_yaml_is_read_back_the_same(config: Config, tmp_path: Path) -> None:
    (tmp_path / "written.yaml").write_text(to_yaml(config), "utf-8")
    assert parsed("--config", tmp_path / "written.yaml") == config


def test_what_is_printed_is_what_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("--objective", "IcePop", "--staleness.intra", "Uniform", "--staleness.intra.high", 3, "--optim.lr", 0.01)
    assert call("train", *argv, "--print_config") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert parsed("--config", tmp_path / "printed.yaml") == parsed(*argv) != Config()


# the commands


def test_help_tells_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    assert "train | resume | replay | eval | calibrate | objectives" in capsys.readouterr().out
    assert call() == 2
    assert 'estr-lite = "estr_lite.cli:main"' in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("command", ["train", "resume", "replay", "eval", "calibrate", "objectives"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--help") == 0
    told = capsys.readouterr().out
    assert f"usage: estr-lite {command}" in told
    assert command in ("objectives", "resume", "replay") or "--staleness.inter" in told


def test_objectives_lists_the_catalogue_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("objectives") == 0
    listed = capsys.readouterr().out
    assert all(kind.__name__ in listed for kind in CATALOGUE)
    assert call("objectives", "Estr") == 0
    assert "τ" in capsys.readouterr().out


def test_train_ends_in_a_table_and_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert call("train", *TINY, "--evaluation.problems", 4, "--evaluation.samples", 2, "--run", run) == 0
    told = capsys.readouterr().out
    for part in ("before", "after 2 steps", "avg@2", "greedy", "pass@2", f"run folder {run}".split("/")[0]):
        assert part in told
    for name in ("step 2/2", "reward", "kept", "lag", "H ", "k3", "ETA"):  # no terminal here: a line now and then
        assert name in told


def test_a_terminal_gets_live_progress(tmp_path: Path) -> None:
    screen = io.StringIO()
    config = Config(
        sampling=Sampling(rollouts=2),
        engine="transformers",
        resources=Resources(engine_process="shared"),
        evaluation=Evaluation(problems=2, samples=1),
        log=Log(tensorboard=False),
        prompts=2,
        steps=2,
        run=str(tmp_path / "run"),
    )
    train(config, Console(file=screen, force_terminal=True, width=120), "")
    shown = screen.getvalue()
    for part in ("test before training", "step", "2/2", "reward", "kept", "lag", "H ", "k3", "0:00:0"):
        assert part in shown


def test_eval_of_a_saved_adapter_repeats_the_runs_own_test(capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run()
    flags = ("--engine", "transformers", "--evaluation.problems", 16, "--evaluation.samples", 2, "--json")
    after = json.loads((run / "summary.json").read_text())["after"]
    assert call("eval", "--adapter", run / "adapters" / "3", *flags) == 0
    assert json.loads(capsys.readouterr().out) == after
    assert call("eval", "--adapter", run / "adapters" / "3", "--lora.rank", 8, *flags) == 0  # the folder's shape counts
    assert json.loads(capsys.readouterr().out) == after


def test_eval_without_an_adapter_scores_the_base(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--engine", "transformers", "--evaluation.problems", 16, "--evaluation.samples", 2)
    assert call("eval", *flags, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tiny_run() / "summary.json").read_text())["before"]


def test_calibrate_gives_the_quantile_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("calibrate", *TINY, "--prompts", 4, "--reject", 0.01, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tau"] == found["quantiles"]["0.01"]
    rising = [found["quantiles"][share] for share in ("0.1", "0.01", "0.001", "0.0001")]
    assert rising == sorted(rising) and rising[0] >= 0
    assert 0 <= found["rejected_stale"] <= 1

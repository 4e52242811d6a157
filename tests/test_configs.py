"""Every YAML in configs/ parses, and states differences from the defaults and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from estr_lite.objectives import CATALOGUE, RULES
from estr_lite.staleness import LAWS
from tests.runs import ROOT, call

FILES = sorted((ROOT / "configs").rglob("*.yaml"))
COMPARISON = [path for path in FILES if path.parent.name == "comparison"]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def resolved(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    """The whole configuration that a command would run with."""
    assert call("train", *argv, "--print_config") == 0
    return yaml.safe_load(capsys.readouterr().out)


def leaves(tree: Any, *path: str) -> dict[tuple[str, ...], Any]:
    """Every value of a tree by its path; a class named in short is its path's `class_path`."""
    if isinstance(tree, dict):
        return {k: v for name, branch in tree.items() for k, v in leaves(branch, *path, name).items()}
    names = {kind.__name__ for kind in (*CATALOGUE, *RULES, *LAWS)}
    return {(*path, "class_path") if path[-1] != "class_path" and tree in names else path: tree}


def test_there_are_the_four_configurations_of_the_comparison() -> None:
    assert {path.stem for path in COMPARISON} == {"none", "estr", "icepop", "kpop"}


@every_file
def test_a_file_parses_to_what_it_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = leaves(resolved(capsys, "--config", path))
    for place, value in leaves(yaml.safe_load(path.read_text("utf-8"))).items():
        found = whole[place].rpartition(".")[2] if place[-1] == "class_path" else whole[place]
        assert found == value, f"{path.name}: {'.'.join(place)}"


@every_file
def test_a_file_states_only_differences_and_says_why(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = leaves(resolved(capsys))
    stated = leaves(yaml.safe_load(path.read_text("utf-8")))
    same = [place for place, value in stated.items() if usual.get(place) == value]
    assert not same, f"{path.name} repeats the defaults of {same}"
    assert path.read_text("utf-8").startswith("# ")


def test_the_comparison_differs_in_the_rule_alone(capsys: pytest.CaptureFixture[str]) -> None:
    rules, rest = [], []
    for path in COMPARISON:
        whole = resolved(capsys, "--config", path)
        rules.append(whole["objective"]["init_args"].pop("rule")["class_path"])
        rest.append(whole)
    assert len(set(rules)) == 4
    assert all(other == rest[0] for other in rest)


def test_the_comparison_has_the_parameters_of_the_published_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    for path, objective in zip(COMPARISON, ("Estr", "IcePop", "KPop"), strict=False):
        rule = resolved(capsys, "--config", path)["objective"]["init_args"]["rule"]["init_args"]
        published = resolved(capsys, "--objective", objective)["objective"]["init_args"]
        assert rule == {name: published[name] for name in rule}, path.name

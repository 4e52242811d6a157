"""Every module imports strictly lower layers, and what is dangerous or heavy is imported where the design says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import estr_lite

ROOT = Path(estr_lite.__file__).parent
LAYERS = [
    {"__init__", "types", "seeds", "checks", "run_folder", "metrics_file"},
    {
        *("objectives", "advantages", "loss", "diagnostics", "ledger", "codec"),
        *("staleness", "distribution", "tasks", "rollout.engine"),
    },
    {"schedule", "policy", "tiny", "modes", "rollout.source", "rollout.mailbox"},
    {"data", "replay", "checkpoint"},
    {"module", "rollout.transformers_engine", "rollout.vllm_engine", "rollout.worker", "rollout.remote"},
    {"config", "evaluate", "rollout.serve"},
    {"build", "rollout.child"},
    {"session"},
    {"callbacks"},
    {"train"},
    {"calibrate"},
    {"cli"},
    {"__main__"},
]
"""A name is a module, or a whole package, whose own modules are free to import each other."""

LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.read_text("utf-8").strip())
ONLY = {"vllm": "rollout/vllm_engine.py", "bitsandbytes": "policy/quantized.py"}
UNSAFE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


def unit(module: str) -> str:
    """`estr_lite.tasks.steps` belongs to the unit `tasks`, `estr_lite.rollout.worker` is one of its own."""
    parts = module.split(".")[1:]
    found = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in LAYER]
    assert found, f"{module} has no layer yet; give it one in LAYERS"
    return found[0]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from estr_lite import x` gives `estr_lite.x`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            below = node.module in ("estr_lite", "estr_lite.rollout")
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if below else (str(node.module),)


def name_of(path: Path) -> str:
    return ".".join(("estr_lite", *path.relative_to(ROOT).with_suffix("").parts))


@every_file
def test_a_module_imports_strictly_lower_layers(path: Path) -> None:
    here = unit(name_of(path))
    for module in imports(path):
        if module.startswith("estr_lite"):
            there = unit(module)
            assert there == here or LAYER[there] < LAYER[here], (
                f"{here} (layer {LAYER[here]}) imports {there} (layer {LAYER[there]})"
            )


@every_file
def test_an_engine_or_a_quantizer_is_imported_in_one_file_only(path: Path) -> None:
    packages = {module.split(".")[0] for module in imports(path)}
    assert all(path.relative_to(ROOT).as_posix() == ONLY[package] for package in packages & ONLY.keys())


@every_file
def test_nothing_evaluates_text_or_unpickles(path: Path) -> None:
    assert not {module.split(".")[0] for module in imports(path)} & UNSAFE
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load")
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            assert "load" not in {alias.name for alias in node.names}


def test_every_layer_is_used() -> None:
    """Names of modules that are gone would make the table lie."""
    present = {unit(name_of(path)) for path in FILES}
    assert set(LAYER) == present

"""Bad input is refused in one line that names it, before long work, with nothing left; failures are delivered."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from estr_lite import cli
from estr_lite.config import Config, Evaluation, Log, Resources
from estr_lite.policy.base import TINY as TINY_MODEL
from estr_lite.rollout.engine import Sampling
from estr_lite.rollout.mailbox import RolloutError
from estr_lite.train import train
from tests.conftest import HAVE_VLLM
from tests.failing import FailingTask
from tests.runs import TINY, call, end, family, one_line, process, scratch, tiny_run, wait_for

needs_vllm = pytest.mark.skipif(not HAVE_VLLM, reason="vLLM is not installed; make setup installs it on Linux")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def refused(capsys: pytest.CaptureFixture[str], code: int, *argv: object, left: tuple[str, ...] = ()) -> str:
    """The line that a command is refused with; it must have done nothing."""
    assert call(*argv) == code
    told = capsys.readouterr()
    assert told.out == "" or code == 1
    assert sorted(path.name for path in Path.cwd().iterdir()) == sorted(left)
    assert scratch(os.getpid()) == []
    return one_line(told.err, str(argv[0]))


def broken_model(folder: Path, name: str, value: float) -> Path:
    """A copy of the shipped model with one weight tensor's first row set to a value."""
    shutil.copytree(TINY_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# usage: exit code 2

USAGE = [
    ("--objective Est", "--objective Est: there is no such class. Did you mean Estr?"),
    ("--objective=Est", "Did you mean Estr?"),
    ("--objective Clipped --objective.rule IcePop", "IcePop: there is no such class. Did you mean IcePopRule?"),
    ("--staleness.inter Unifrom", "--staleness.inter Unifrom: there is no such class. Did you mean Uniform?"),
    ("--staleness.switch Evry", "Did you mean Every?"),
    ("--advantage GroupNormalised", "Did you mean GroupNormalized?"),
    ("--task Countdwn", "Did you mean Countdown?"),
    ("--objective nowhere.Thing", "--objective: No module named 'nowhere'"),
    ("--objective estr_lite.types.Prompt", "Import path estr_lite.types.Prompt does not correspond to a subclass"),
    ("--lora.rnk 3", "--lora.rnk 3. Did you mean --lora.rank?"),
    ("--step 3", "--step 3. Did you mean --steps?"),
    ("--objective.tua 3", "--objective.tua: Estr has no such option. Did you mean --objective.tau?"),
    ("--objective Grpo --objective.tau 3", "--objective.tau: Grpo has no such option. Choose from --objective.clip_"),
    ("--objective Clipped --objective.rule EstrRule", "--objective.rule EstrRule needs --objective.rule.tau as well."),
    ("--lora.rank x", "--lora.rank: expected a whole number, got x."),
    ("--optim.lr fast", "--optim.lr: expected a number, got fast."),
    ("--log.tensorboard maybe", "--log.tensorboard: expected true or false, got maybe."),
    ("--seed 1.5", "--seed: expected a whole number, got 1.5."),
    ("--engine vlm", "--engine: expected one of auto, transformers, vllm, got vlm."),
    ("--model.dtype float16", "--model.dtype: expected one of float32, bfloat16, got float16."),
    ("--config nowhere.yaml", "--config: File does not exist"),
    ("stray", "stray"),
    ("--objective.tau -1", "--objective.tau: Estr.tau must be above 0 and finite, got -1.0."),
    ("--objective.tau 0", "--objective.tau: Estr.tau must be above 0 and finite, got 0.0."),
    ("--objective.tau .nan", "--objective.tau: Estr.tau must be above 0 and finite, got nan."),
    ("--objective Clipped --objective.rule EstrRule --objective.rule.tau 0", "--objective.rule.tau: EstrRule.tau must"),
    ("--staleness.inter.steps -3", "--staleness.inter.steps: Fixed.steps must be at least 0 and finite, got -3."),
    ("--staleness.intra.steps -3", "--staleness.intra.steps: Fixed.steps must be at least 0 and finite, got -3."),
    ("--staleness.inter Uniform --staleness.inter.low 9", "--staleness.inter.high: Uniform.high must be at least 9"),
    ("--staleness.switch At --staleness.switch.positions [4,2]", "--staleness.switch.positions: At.positions must be"),
    ("--sampling.rollouts 1", "sampling.rollouts is 1, but GroupNormalized compares a rollout with its group"),
    ("--sampling.rollouts 0", "sampling.rollouts must be at least 1, got 0."),
    ("--sampling.temperature 0", "sampling.temperature must be above 0 to train, got 0"),
    ("--sampling.temperature -1", "sampling.temperature must be 0 or above and finite, got -1.0."),
    ("--sampling.top_p 0.9", "sampling.top_p must be 1, got 0.9"),
    ("--sampling.top_k 50", "sampling.top_k must be 0, got 50"),
    ("--lora.rank 0", "lora.rank must be at least 1, got 0."),
    ("--steps 0", "--steps: Config.steps must be at least 1 and finite, got 0."),
    ("--optim.lr 0", "--optim.lr: Optim.lr must be above 0 and finite, got 0.0."),
    ("--optim.minibatches 3 --prompts 2", "optim.minibatches is 3, but a step has only 2 groups"),
    ("--vllm.kv_gib 0", "--vllm.kv_gib: Vllm.kv_gib must be above 0 and finite, got 0.0."),
    ("--task Jsonl", "--task Jsonl needs --task.train, --task.test as well."),
    ("--task Jsonl --task.train nowhere.jsonl --task.test nowhere.jsonl", "there is no file nowhere.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "told"), USAGE, ids=[flags for flags, _ in USAGE])
def test_bad_usage_names_the_flag_the_value_and_what_would_do(
    flags: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, 2, "train", *flags.split())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("objective: Grop", "--objective Grop: there is no such class. Did you mean Grpo?"),
        ("lora: {rnak: 3}", "there is no option --lora.rnak. Did you mean --lora.rank?"),
        ("stepz: 3", "there is no option 'stepz'. Did you mean --steps?"),
        ("objective: {class_path: Estr, init_args: {tua: 3}}", "--objective.tua: Estr has no such option."),
        ("staleness: {intra: {class_path: Fixed, init_args: {steps: -1}}}", "--staleness.intra.steps: Fixed.steps"),
        ("lora: [", "Problems parsing config"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_alike(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert call("train", "--config", tmp_path / "bad.yaml") == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (["tran"], 2, "there is no command 'tran'. Did you mean train?"),
        (["objectives", "Est"], 2, "there is no objective 'Est'. Did you mean Estr?"),
        (["calibrate", "--reject", "2"], 1, "--reject must be between 0 and 1, got 2.0."),
        (["eval", "--evaluation.problems", "0"], 1, "evaluation.problems must be at least 1 to evaluate, got 0."),
    ],
)
def test_other_commands_refuse_alike(
    argv: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert call(*argv) == code
    assert told in capsys.readouterr().err
    assert list(elsewhere.iterdir()) == []


def test_a_row_without_an_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "who knows"}, {"question": "3+3?"}]
    for name, some in (("good", rows[:1]), ("bad", rows[:2]), ("none", [rows[0], rows[2]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name in ("bad", "none"):
        flags = ("--task", "Jsonl", "--task.train", tmp_path / "good.jsonl", "--task.test", tmp_path / f"{name}.jsonl")
        told = refused(capsys, 2, "train", *flags)
        assert f"{name}.jsonl, row 2 has no answer" in told and "expected an integer" in told


# what the configuration cannot know: exit code 1, before any long work


def test_a_model_folder_must_hold_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, 1, "train", *TINY, "--model.path", tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'}' is no folder" in told
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    (folder / "model.safetensors").unlink()
    told = refused(capsys, 1, "train", *TINY, "--model.path", folder)
    assert f"{folder}' has no weights: expected a *.safetensors file" in told
    (folder / "config.json").unlink()
    assert "has no config.json" in refused(capsys, 1, "train", *TINY, "--model.path", folder)


def test_an_adapter_folder_must_hold_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        folder = tmp_path / name
        shutil.copytree(tiny_run() / "adapters" / "3", folder)
        (folder / name).unlink()
        told = refused(capsys, 1, "eval", *TINY, "--evaluation.problems", 2, "--adapter", folder)
        assert f"Adapter folder {folder} has no {name}" in told
    told = refused(capsys, 1, "eval", *TINY, "--evaluation.problems", 2, "--adapter", "nowhere")
    assert "Adapter folder nowhere has no adapter" in told


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(tiny_run() / "adapters" / "3", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    test = ("eval", *TINY, "--evaluation.problems", 2, "--adapter", folder)

    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "meta/Llama-9"}))
    assert f"The adapter in {folder} was trained on base 'meta/Llama-9', not on" in refused(capsys, 1, *test)

    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    assert f"The adapter in {folder} has use_rslora, which is not supported" in refused(capsys, 1, *test)

    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "adapter_model.safetensors")
    wide = {name: torch.cat([value, value], -1) for name, value in tensors.items()}
    save_file(wide, folder / "adapter_model.safetensors")
    assert "The adapter belongs to another base or rank" in refused(capsys, 1, *test)

    renamed = {name.replace("layers.3", "layers.7"): value for name, value in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")
    assert "The adapter belongs to another base or other targets" in refused(capsys, 1, *test)


def test_a_prompt_or_completion_longer_than_the_context_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, 1, "train", *TINY, "--sampling.max_tokens", 256)
    assert "sampling.max_tokens is 256, but tiny has a context of 256 tokens" in told and "lower it to 255" in told
    told = refused(capsys, 1, "train", *TINY, "--sampling.max_tokens", 250)
    assert "Prompt countdown:" in told and "only 6 fit beside the completion" in told
    rows = [{"question": "1+2" * n, "answer": "3"} for n in (1, 100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = ("--task", "Jsonl", "--task.train", tmp_path / "rows.jsonl", "--task.test", tmp_path / "rows.jsonl")
    told = refused(capsys, 1, "train", *TINY, *task, "--task.instruction", "=")
    assert "Prompt rows:2 has 301 tokens, but only 224 fit" in told


def test_a_run_folder_that_exists_is_never_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    told = refused(capsys, 1, "train", *TINY, "--run", "run", left=("run",))
    assert "run run exists already; name another folder" in told
    assert list(Path("run").iterdir()) == []


@pytest.mark.parametrize(
    "place", ["file/run", "file/deeper/run", "/proc/estr-lite/run"]
)  # not even root can write there
def test_a_folder_that_cannot_be_written_is_named(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    told = refused(capsys, 1, "train", *TINY, "--run", place, left=("file",))
    assert f"run {place} cannot be written" in told and "Name a folder that can" in told


def test_a_run_that_never_started_takes_the_folders_it_made_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    deep = "runs/of/today/run"
    refused(capsys, 1, "train", *TINY, "--sampling.max_tokens", 256, "--run", deep, left=("runs",))
    assert list(Path("runs").iterdir()) == []


def test_a_rank_that_vllm_cannot_take_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    if not HAVE_VLLM:
        pytest.skip("without vLLM, that it is missing comes first")
    told = refused(capsys, 1, "train", *TINY, "--lora.rank", 12, "--engine", "vllm")
    assert "lora.rank 12 cannot be served by vLLM; it takes 1, 8, 16" in told


def test_vllm_where_it_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # to Python, a module that cannot be found
    told = refused(capsys, 1, "train", *TINY, "--engine", "vllm")
    assert "vLLM is not installed: pip install" in told and "--engine transformers" in told
    assert call("train", *TINY, "--engine", "auto", "--run", "run") == 0  # and nobody needs it
    assert json.loads(Path("run/summary.json").read_text())["engine"] == "transformers"


# numbers that are not finite


def test_a_base_of_nan_is_refused_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = broken_model(tmp_path / "nan", "model.norm.weight", float("nan"))
    for command in ("train", "eval"):
        told = refused(capsys, 1, command, *TINY, "--evaluation.problems", 2, "--model.path", folder)
        assert f"{folder} gives logits that are not finite: it holds NaN or infinite weights" in told


def test_an_adapter_of_nan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(tiny_run() / "adapters" / "3", folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors")
    told = refused(capsys, 1, "eval", *TINY, "--evaluation.problems", 2, "--adapter", folder)
    assert f"{folder} gives logits that are not finite" in told


def late_nan(folder: Path) -> Path:
    """A base whose prompts are sound, and whose logits are NaN from the first `;` that it writes itself."""
    shutil.copytree(TINY_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][16] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def test_nan_logits_of_the_engine_end_the_run_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = late_nan(tmp_path / "nan")
    assert call("train", *TINY, "--steps", 50, "--model.path", folder, "--run", "run") == 1
    told = capsys.readouterr()
    line = one_line(told.err, "train")
    assert "the engine's logits were not finite for" in line and "holds NaN or infinite weights" in line
    assert "holds what was done so far" in told.out and Path("run/adapters/0").is_dir()
    assert scratch(os.getpid()) == []
    assert call("eval", *TINY, "--evaluation.problems", 8, "--model.path", folder) == 1
    assert "are not finite: the model or its adapter holds NaN" in one_line(capsys.readouterr().err, "eval")


# failures are delivered


def test_a_failure_of_the_worker_reaches_the_trainer_at_once_with_its_cause(tmp_path: Path) -> None:
    task = FailingTask(call=9)
    config = Config(
        task=task,
        sampling=Sampling(rollouts=2),
        engine="transformers",
        resources=Resources(engine_process="shared"),
        evaluation=Evaluation(problems=0),
        log=Log(tensorboard=False),
        prompts=2,
        steps=1000,
        run=str(tmp_path / "run"),
    )
    with pytest.raises(RolloutError, match="the grader ran out of ink") as failure:
        train(config, Console(quiet=True), "")
    assert time.monotonic() - task.when[0] < 5
    assert isinstance(failure.value.__cause__, RuntimeError)
    kept = sorted(int(path.name) for path in (tmp_path / "run" / "adapters").iterdir())
    assert kept[0] == 0 and len(kept) == 2  # and the last version that was trained
    assert scratch(os.getpid()) == []


def test_a_failure_during_the_test_before_training_leaves_nothing(tmp_path: Path) -> None:
    config = Config(
        task=FailingTask(call=3),
        engine="transformers",
        resources=Resources(engine_process="shared"),
        evaluation=Evaluation(problems=4),
        run=str(tmp_path / "run"),
    )
    with pytest.raises(RuntimeError, match="the grader ran out of ink"):
        train(config, Console(quiet=True), "")
    assert not (tmp_path / "run").exists() and scratch(os.getpid()) == []


def test_an_unforeseen_failure_shows_its_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    failing = ("--task", "tests.failing.FailingTask", "--task.call", 9)
    assert call("train", *TINY, "--steps", 50, *failing, "--run", tmp_path / "run") == 1
    told = capsys.readouterr().err
    assert "Traceback" in told and "in effect" in told  # where in the grader
    assert told.splitlines()[-1].startswith("estr-lite train: error: The rollout worker failed before step")
    assert "the grader ran out of ink" in told.splitlines()[-1]


def test_a_defect_is_not_told_as_bad_input() -> None:
    failing = ("--task", "tests.failing.FailingTask", "--task.call", "3")
    with pytest.raises(RuntimeError, match="the grader ran out of ink"):  # not an exit code
        cli.main(["train", *TINY, "--evaluation.problems", "4", *failing])


def failing_process(engine: str, run: Path) -> None:
    """A whole process whose grader fails ends at once, alone, and gives its memory back."""
    failing = ("--task", "tests.failing.FailingTask", "--task.call", 9)
    with process("train", *TINY, "--steps", 1000, "--engine", engine, *failing, "--run", run) as running:
        wait_for(lambda: bool(scratch(running.pid)), running)
        code, _, errors = end(running)
        assert code == 1 and "the grader ran out of ink" in errors.splitlines()[-1]
        assert not family(running) and scratch(running.pid) == []


def test_a_process_that_fails_leaves_no_child_and_no_scratch(tmp_path: Path) -> None:
    failing_process("transformers", tmp_path / "run")


@pytest.mark.vllm
@needs_vllm
def test_a_process_with_vllm_that_fails_leaves_no_child_and_no_scratch(tmp_path: Path) -> None:
    failing_process("vllm", tmp_path / "run")


@pytest.mark.vllm
@needs_vllm
def test_no_memory_for_the_kv_cache_is_told_before_anything_runs(tmp_path: Path) -> None:
    large = ("train", *TINY, "--engine", "vllm", "--vllm.kv_gib", 1e6, "--run", tmp_path / "large")
    small = ("train", *TINY, "--engine", "vllm", "--vllm.kv_gib", 0.0006, "--run", tmp_path / "small")
    with process(*large) as first, process(*small) as second:
        for running, advice in ((first, "Lower vllm.kv_gib (now 1e+06)."), (second, "Raise vllm.kv_gib (now 0.0006).")):
            code, _, errors = end(running)
            assert code == 1
            line = one_line(errors, "train")
            assert "vLLM could not start" in line and line.endswith(advice)
            assert not family(running) and scratch(running.pid) == []
    assert list(tmp_path.glob("*al*")) == []

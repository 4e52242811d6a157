"""A run from end to end: its folder is whole and true, it can be repeated, ended by Ctrl-C, and loses nothing."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from estr_lite.config import Config, Evaluation, Log, Resources
from estr_lite.distribution import entropy, log_softmax
from estr_lite.policy.base import TINY as TINY_MODEL
from estr_lite.rollout.engine import Sampling
from estr_lite.staleness import Fixed, Staleness
from estr_lite.train import train
from tests.runs import TINY, call, end, family, process, scratch, tiny_run, wait_for

STEPS, PROMPTS, ROLLOUTS = 3, 4, 4  # of the tiny run
ALWAYS_FINITE = {
    *("reward/mean", "reward/accuracy", "reward/zero_variance_groups"),
    *("length/mean", "length/max", "length/truncated"),
    *("staleness/inter_mean", "staleness/inter_max", "staleness/intra_mean", "staleness/intra_max"),
    *("staleness/lag_mean", "staleness/warmup"),
    *("tokens/trained", "tokens/nonfinite", "keep/fraction", "keep/clip_fraction"),
    *("ratio/ess", "ratio/ess_applied", "ratio/k1", "ratio/k3", "ratio/abs_delta_mean", "ratio/abs_delta_p99"),
    *("ratio/delta2", "ratio/delta2_kept", "ratio/z_variance", "entropy/behavior", "entropy/policy"),
    *("optim/lr", "optim/grad_norm"),
    *("time/step_seconds", "time/trainer_wait_share", "time/engine_wait_share", "time/trained_tokens_per_second"),
    *(f"bins/tokens_{label}" for label in ("0-0.01", "0.01-0.1", "0.1-0.3", "0.3-0.6", "0.6-1", "1-inf")),
}


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def weights(run: Path, version: int) -> bytes:
    return (run / "adapters" / str(version) / "adapter_model.safetensors").read_bytes()


# the folder


def test_the_folder_holds_everything_and_all_of_it_parses() -> None:
    run = tiny_run()
    found = {path.name for path in run.iterdir()}
    assert found == {
        *("config.yaml", "environment.json", "metrics.csv", "tensorboard", "events.jsonl"),
        *("rollouts", "adapters", "checkpoints", "summary.json", "ledger.json"),
    }
    assert yaml.safe_load((run / "config.yaml").read_text("utf-8"))["steps"] == STEPS
    environment = json.loads((run / "environment.json").read_text("utf-8"))
    assert environment["engine"] == "transformers" and "torch" in environment["packages"]
    assert sorted(path.name for path in (run / "adapters").iterdir()) == ["0", "1", "2", "3"]
    assert len(list((run / "rollouts").iterdir())) == STEPS
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert {"reward/mean", "ratio/k3"} <= set(board.Tags()["scalars"])
    assert {"staleness/inter", "staleness/intra"} <= set(board.Tags()["histograms"])


def test_the_summary_says_how_the_run_went() -> None:
    summary = json.loads((tiny_run() / "summary.json").read_text("utf-8"))
    assert (summary["steps"], summary["interrupted"], summary["engine"]) == (STEPS, "", "transformers")
    assert summary["canary"] < 1e-3
    for when in ("before", "after"):
        assert summary[when]["problems"] == 16
        assert 0 <= summary[when]["avg"] <= summary[when]["pass_at_k"] <= 1


def test_the_metrics_have_every_name_and_are_finite_where_there_is_something_to_average() -> None:
    table = rows(tiny_run())
    assert [int(row["step"]) for row in table] == list(range(STEPS))
    bins = {name.removeprefix("bins/tokens_") for name in ALWAYS_FINITE if name.startswith("bins/")}
    means = {f"bins/{kind}_{label}" for kind in ("kept", "delta2") for label in bins}
    lonely = {"keep/positive_advantage", "keep/negative_advantage"}  # a step may lack a sign of advantage
    assert set(table[0]) == ALWAYS_FINITE | means | lonely | {"step"}
    for row in table:
        assert all(math.isfinite(float(row[name])) for name in ALWAYS_FINITE)
        assert sum(float(row[f"bins/tokens_{label}"]) for label in bins) == float(row["tokens/trained"])
        for label in bins:
            assert math.isfinite(float(row[f"bins/kept_{label}"])) == (float(row[f"bins/tokens_{label}"]) > 0)


def test_every_event_parses_and_the_steps_hold_their_tickets() -> None:
    events = lines(tiny_run() / "events.jsonl")
    trainers = [event for event in events if event["event"] not in ("admit", "segment")]
    assert [event["event"] for event in trainers] == ["start", *["pop", "publish", "step"] * STEPS]
    assert [event["version"] for event in events if event["event"] == "publish"] == [1, 2, 3]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    books = {"generated", "trained", "masked", "dropped", "queued", "in_flight"}
    for step, event in enumerate(event for event in events if event["event"] == "step"):
        assert event["step"] == step and event["ledger"].keys() == books
        assert sum(event["inter"].values()) == PROMPTS * ROLLOUTS
    for step, event in enumerate(event for event in events if event["event"] == "pop"):
        assert event["step"] == step and [ticket[0] for ticket in event["tickets"]] == list(range(PROMPTS))
        for _, uid, seed, segments in event["tickets"]:
            assert uid.startswith("countdown:") and isinstance(seed, int)
            assert segments == [[0, max(0, step - 1)]]  # lag 1, clamped at the start
    admitted = [ticket for event in events if event["event"] == "admit" for ticket in event["tickets"]]
    assert [ticket[:2] for ticket in admitted] == [[s, slot] for s in range(STEPS) for slot in range(PROMPTS)]


def test_peft_loads_every_adapter_and_it_scores_as_the_rollouts_say() -> None:
    run = tiny_run()
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    checked = 0
    for step in range(STEPS):
        (version,) = {v for row in lines(run / "rollouts" / f"step-{step:06d}.jsonl") for v in row["version"]}
        base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, run / "adapters" / str(version))
        for row in lines(run / "rollouts" / f"step-{step:06d}.jsonl"):
            prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
            ids = torch.tensor([prompt + row["token_ids"]])
            with torch.no_grad():
                scores = log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], 1.0)
            logp = scores.gather(1, torch.tensor(row["token_ids"])[:, None]).squeeze(1)
            torch.testing.assert_close(logp, torch.tensor(row["logp"]), atol=1e-4, rtol=0)
            torch.testing.assert_close(entropy(scores), torch.tensor(row["entropy"]), atol=1e-4, rtol=0)
            checked += len(logp)
    assert checked > 300
    assert len({weights(run, version) for version in range(STEPS + 1)}) == STEPS + 1


def test_the_configuration_in_the_folder_repeats_the_run(tmp_path: Path) -> None:
    first, again = tiny_run(), tmp_path / "again"
    assert call("train", "--config", first / "config.yaml", "--run", again) == 0
    assert weights(again, STEPS) == weights(first, STEPS)
    for name in ("before", "after"):
        summaries = [json.loads((run / "summary.json").read_text("utf-8")) for run in (first, again)]
        assert summaries[0][name] == summaries[1][name]
    third = tmp_path / "third"
    assert call("train", "--config", again / "config.yaml", "--run", third, "--evaluation.problems", 0) == 0
    assert weights(third, STEPS) == weights(first, STEPS)


def test_the_base_model_is_not_touched(tmp_path: Path) -> None:
    def digest() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in TINY_MODEL.iterdir()}

    before = digest()
    assert call("train", *TINY, "--run", tmp_path / "run") == 0
    assert digest() == before


def test_a_notebook_trains_outside_the_main_thread_too(tmp_path: Path) -> None:
    config = Config(
        staleness=Staleness(Fixed(1), Fixed(0)),
        sampling=Sampling(rollouts=2),
        engine="transformers",
        resources=Resources(engine_process="shared"),
        evaluation=Evaluation(problems=0),
        log=Log(tensorboard=False),
        prompts=2,
        steps=2,
        run=str(tmp_path / "run"),
    )
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(train(config, Console(quiet=True), "")))
    thread.start()
    thread.join()
    assert found[0].steps == 2 and found[0].before is None
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"config.yaml", "metrics.csv", "summary.json"}


def test_nothing_is_left_in_memory_after_a_run() -> None:
    tiny_run()
    assert scratch(os.getpid()) == []


# Ctrl-C


def test_ctrl_c_finishes_the_step_and_saves_everything(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with process("train", *TINY, "--steps", 100000, "--run", run) as running:
        wait_for(lambda: (run / "metrics.csv").is_file() and len(rows(run)) >= 10, running)
        assert len(scratch(running.pid)) == 2  # the folder and its lock
        running.send_signal(signal.SIGINT)
        code, told, errors = end(running)
        assert code == 130, errors
        assert not family(running) and scratch(running.pid) == []
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    steps = summary["steps"]
    assert summary["interrupted"] and steps >= 10
    assert f"SIGINT after step {steps} of 100000; the checkpoint is saved" in told
    assert [int(row["step"]) for row in rows(run)] == list(range(steps))
    kinds = [event["event"] for event in lines(run / "events.jsonl")]
    assert (kinds.count("pop"), kinds.count("publish"), kinds.count("step")) == (steps, steps, steps)
    assert call("eval", "--adapter", run / "adapters" / str(steps), "--evaluation.problems", 2) == 0


@pytest.mark.parametrize("command", ["train", "eval"])
def test_ctrl_c_during_a_test_before_training_leaves_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    interrupting = ("--task", "tests.failing.InterruptingTask", "--task.call", 3)
    assert call(command, *TINY, "--evaluation.problems", 64, *interrupting) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [] and scratch(os.getpid()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_a_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    interrupting = ("--task", "tests.failing.InterruptingTask", "--task.call", 3)
    assert call("calibrate", *TINY, "--steps", 1000, *interrupting) == 130
    assert "tau" not in capsys.readouterr().out


def test_a_second_ctrl_c_ends_within_the_step_and_keeps_what_was_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    twice = ("--objective", "tests.failing.InterruptingObjective", "--objective.step", 3)
    assert call("train", *TINY, "--steps", 1000, *twice, "--run", run) == 130
    assert {path.name for path in (run / "adapters").iterdir()} == {"0", "3"}
    assert [int(row["step"]) for row in rows(run)] == [0, 1, 2]
    assert scratch(os.getpid()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

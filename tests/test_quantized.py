"""QLoRA: over a base in 4 bits scores are finite, and a training step moves the adapter alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from estr_lite.build import Parts, prepare
from estr_lite.config import Config
from estr_lite.loss import policy_loss
from estr_lite.objectives import Reinforce
from estr_lite.policy.adapter import causal_lm, lora_parameters
from estr_lite.policy.base import Model, load_base
from estr_lite.policy.score import score
from tests.builders import make_batch, make_evidence
from tests.runs import TINY, call

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install 'estr-lite[qlora]'",
)


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    config = Config()
    found = prepare(Model(quantization="nf4"), config.lora, config.task, config.sampling, 0)
    yield found
    found.store.close()


def frozen(parts: Parts) -> dict[str, Tensor]:
    return {name: p for name, p in parts.model.named_parameters() if not p.requires_grad}


def test_the_linear_layers_are_packed_in_four_bits(parts: Parts) -> None:
    full = dict(load_base(Model()).named_parameters())
    packed = {name: p for name, p in frozen(parts).items() if p.dtype == torch.uint8}
    assert len(packed) == sum("proj" in name for name in full) == 28
    values = sum(p.numel() for name, p in full.items() if "proj" in name)
    assert sum(p.numel() for p in packed.values()) == values / 2  # two to a byte


def test_scores_are_finite_and_near_those_of_the_full_base(parts: Parts) -> None:
    batch = make_batch()
    with torch.no_grad():
        logp, spread = score(causal_lm(parts.model), batch, 1.0)
        full, _ = score(load_base(Model()), batch, 1.0)
    assert logp.isfinite().all() and spread.isfinite().all()
    error = (logp - full)[batch.token_mask].abs()
    assert 0 < error.mean() < 0.1 * full[batch.token_mask].abs().mean()


def test_a_step_moves_the_adapter_and_nothing_else(parts: Parts) -> None:
    before = {name: p.detach().clone() for name, p in frozen(parts).items()}
    live = lora_parameters(parts.model)
    adapter = {name: p.detach().clone() for name, p in live.items()}
    batch = make_batch()
    with torch.no_grad():
        score(causal_lm(parts.model), batch, 1.0)  # where bitsandbytes may repack what it takes for inference
    logp, _ = score(causal_lm(parts.model), batch, 1.0)
    evidence = make_evidence(*logp.shape, mask=batch.valid, advantage=batch.advantage)
    policy_loss(logp, Reinforce()(evidence), batch.advantage, batch.valid, float(batch.valid.sum())).backward()
    assert all(p.grad is None for p in frozen(parts).values())
    grads = {name: p.grad for name, p in live.items()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    assert all(float(g.abs().max()) > 0 for name, g in grads.items() if "lora_B" in name and g is not None)
    torch.optim.AdamW(live.values(), lr=1e-3).step()
    assert all(torch.equal(p, before[name]) for name, p in frozen(parts).items())
    assert any(not torch.equal(p, adapter[name]) for name, p in live.items())


def test_a_whole_run_on_a_quantized_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nf4, run = ("--model.quantization", "nf4"), tmp_path / "run"
    test = ("--evaluation.problems", 4, "--evaluation.samples", 2)
    assert call("train", *TINY, *test, *nf4, "--run", run) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["canary"] < 1e-3
    capsys.readouterr()
    assert call("eval", *TINY, *test, *nf4, "--adapter", run / "adapters" / "2", "--json") == 0
    assert json.loads(capsys.readouterr().out) == summary["after"]


def test_without_bitsandbytes_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # to Python, a module that cannot be found
    assert call("train", *TINY, "--model.quantization", "nf4", "--run", tmp_path / "run") == 1
    assert "model.quantization nf4 needs bitsandbytes: pip install 'estr-lite[qlora]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

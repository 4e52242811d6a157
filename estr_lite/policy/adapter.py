"""LoRA on the frozen base: build it, read it, write it, and the store of its versions."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from estr_lite.policy.base import read_json

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM's LoRA kernels take."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Lora:
    """The adapter that is trained.

    Args:
        rank: inner width r; vLLM takes 1, 8, 16, 32, 64, 128, 256, 320 and 512.
        alpha: scale; the update is alpha / rank · B A.
        targets: regular expression over module names, or `all-linear`.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}.")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha must be above 0, got {self.alpha}.")


@dataclass(frozen=True, eq=False)
class Adapter:
    """One version of the adapter and what a fixed probe scores under it in the trainer (the canary's truth).

    The trainer scores the probe after it has announced the version, so that an engine may begin meanwhile.
    """

    version: int
    tensors: Mapping[str, Tensor]  # PEFT's names, float32 on CPU
    scored: Future[Tensor]

    @property
    def probe_logp(self) -> Tensor:
        """(N-1) the probe's log-probabilities; waits until they are there."""
        return self.scored.result()


def known(probe_logp: Tensor) -> Future[Tensor]:
    """A score that is there already."""
    future = Future[Tensor]()
    future.set_result(probe_logp)
    return future


def attach(base: PreTrainedModel, lora: Lora, seed: int) -> PeftModel:
    """The base with a fresh adapter: A seeded, B zero, so version 0 is the base exactly."""
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(base, config, autocast_adapter_dtype=True)
    assert isinstance(model, PeftModel)
    return model


def twin(model: PeftModel) -> PeftModel:
    """A model that shares the frozen base tensors and has LoRA weights of its own: what an engine decodes with."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False).eval()  # pyright: ignore[reportReturnType]


def causal_lm(model: PeftModel) -> PreTrainedModel:
    """The language model itself, with LoRA layers in place."""
    base = model.get_base_model()
    assert isinstance(base, PreTrainedModel)
    return base


def lora_parameters(model: PeftModel) -> dict[str, Tensor]:
    """The live LoRA parameters under the names that PEFT writes to disk."""
    name = re.compile(r"\.(lora_[AB])\.default\.weight$")
    return {name.sub(r".\1.weight", n): p for n, p in model.named_parameters() if name.search(n)}


def target_modules(model: PeftModel) -> list[str]:
    """The last names of the modules that have LoRA, such as q_proj."""
    return sorted({name.split(".")[-3] for name in lora_parameters(model)})


def read_tensors(model: PeftModel) -> dict[str, Tensor]:
    """A copy of the adapter's weights, on CPU."""
    return {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in lora_parameters(model).items()}


@torch.no_grad()
def write_tensors(model: PeftModel, tensors: Mapping[str, Tensor]) -> None:
    """Put an adapter's weights into the model; ValueError where they are another base's or another rank's."""
    live = lora_parameters(model)
    missing, foreign = sorted(live.keys() - tensors.keys()), sorted(tensors.keys() - live.keys())
    if missing or foreign:
        raise ValueError(
            f"The adapter belongs to another base or other targets: {len(missing)} tensors are missing "
            f"(first {missing[:1]}), {len(foreign)} are foreign (first {foreign[:1]})."
        )
    for name, parameter in live.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(
                f"The adapter belongs to another base or rank: {name} has shape {tuple(tensors[name].shape)}, "
                f"the model wants {tuple(parameter.shape)}."
            )
        parameter.copy_(tensors[name])


def save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> None:
    """Write an adapter in PEFT's format; the folder appears whole or not at all."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_file(dict(tensors), part / WEIGHTS)
    (part / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def load(folder: Path, base_source: str) -> dict[str, Tensor]:
    """An adapter's weights from a PEFT folder; ValueError if its config names another base model."""
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"Adapter folder {folder} has no {name}.")
    named = read_json(folder / CONFIG).get("base_model_name_or_path")
    if named is not None and Path(str(named)).name != Path(base_source).name:
        raise ValueError(f"The adapter in {folder} was trained on base {named!r}, not on {base_source!r}.")
    return load_file(folder / WEIGHTS)


def peft_config(model: PeftModel) -> dict[str, object]:
    """adapter_config.json of the model's adapter, without this machine's folder in it."""
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = Path(str(config["base_model_name_or_path"])).name
    config["inference_mode"] = True
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}


class Versions(Protocol):
    """What an engine reads adapters from."""

    def tensors(self, version: int) -> Mapping[str, Tensor]: ...

    def folder(self, version: int) -> Path: ...


class AdapterStore:
    """Every version that a ticket may still name, in memory; a folder of it where an engine reads files.

    The trainer's thread adds and discards, the worker's reads: a version is added before it is announced and never
    changed after, so readers need no lock. Versions that a ticket in flight needs are held until it is done.
    """

    def __init__(self, config: Mapping[str, object], scratch: Path, owned: FileLock) -> None:
        self.config, self.scratch, self._owned = config, scratch, owned
        self._versions: dict[int, Adapter] = {}
        self._holds = Counter[int]()
        self._lock = threading.Lock()
        self.files = False
        """Whether another process reads the versions from their folders."""

    def add(self, adapter: Adapter) -> None:
        self._versions[adapter.version] = adapter

    def __getitem__(self, version: int) -> Adapter:
        try:
            return self._versions[version]
        except KeyError:
            known = sorted(self._versions)
            raise KeyError(f"Adapter version {version} is not in the store, which holds {known}.") from None

    def get(self, version: int) -> Adapter | None:
        """The version, or None where it was discarded."""
        return self._versions.get(version)

    def __len__(self) -> int:
        return len(self._versions)

    def tensors(self, version: int) -> Mapping[str, Tensor]:
        """The version's weights."""
        return self[version].tensors

    def folder(self, version: int) -> Path:
        """The version as a PEFT folder, written when first asked for."""
        self.write(version)
        path = self.scratch / f"v{version}"
        if not path.is_dir():
            raise KeyError(f"Adapter version {version} is not in the store any more.")
        return path

    def write(self, version: int) -> None:
        """Write the version's folder for another process to read, unless it was discarded."""
        path = self.scratch / f"v{version}"
        with self._lock:
            if version in self._versions and not path.is_dir():
                save(path, self[version].tensors, self.config)

    def hold(self, versions: Iterable[int]) -> None:
        """Keep these versions, those that do not exist yet too, until they are released as often."""
        with self._lock:
            self._holds.update(versions)

    def release(self, versions: Iterable[int]) -> None:
        with self._lock:
            self._holds.subtract(versions)
            self._holds = +self._holds

    def discard_below(self, version: int) -> None:
        """Forget versions that no later ticket can name, but for those that are held."""
        with self._lock:
            for old in [v for v in self._versions if v < version and not self._holds[v]]:
                del self._versions[old]
                shutil.rmtree(self.scratch / f"v{old}", ignore_errors=True)

    @property
    def versions(self) -> dict[int, Adapter]:
        """Every version that is kept."""
        return dict(self._versions)

    def close(self) -> None:
        """Remove the folders, and say that nobody needs them."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        Path(self._owned.lock_file).unlink(missing_ok=True)
        self._owned.release()


class AdapterFolder:
    """The versions that another process's store has written, read when they are asked for."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def folder(self, version: int) -> Path:
        """The version as a PEFT folder."""
        path = self._scratch / f"v{version}"
        if not path.is_dir():
            raise KeyError(f"Adapter version {version} is not in {self._scratch}.")
        return path

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The version's weights."""
        return load_file(self.folder(version) / WEIGHTS)

"""The engine's side of the pipe: build what the specification names, then answer one message after another."""

from __future__ import annotations

import importlib
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from estr_lite.codec import pack, pack_rollouts, ticket_from_json, ticket_to_json, unpack
from estr_lite.policy.adapter import AdapterFolder, Lora, attach
from estr_lite.policy.base import Model, load_base, load_tokenizer, stop_tokens
from estr_lite.rollout.engine import Advance, Engine, EngineError, Sampling, Vllm

Reply = tuple[dict[str, Any], Mapping[str, Tensor]]


def serve(descriptor: int, spec: Mapping[str, Any]) -> None:
    """Answer until the parent closes the engine or goes away."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"(transformers|torch|vllm|peft)\b.*")
    torch.set_num_threads(int(spec["threads"]))
    connection = Connection(descriptor)
    module, _, name = str(spec["builder"]).rpartition(".")
    try:
        engine: Engine = getattr(importlib.import_module(module), name)(spec)
    except Exception as failure:
        connection.send_bytes(pack({"error": _told(failure)}, {}))
        return
    connection.send_bytes(_answer(engine, ({"max_rows": engine.max_rows, "lanes": engine.lanes}, {})))
    while True:
        try:
            message, tensors = unpack(connection.recv_bytes())
        except EOFError:
            return
        if message["op"] == "close":
            engine.close()
            return
        try:
            reply = _answer(engine, OPERATIONS[message["op"]](engine, message, tensors))
        except Exception as failure:
            reply = pack({"error": _told(failure)}, {})
        connection.send_bytes(reply)


def transformers_engine(spec: Mapping[str, Any]) -> Engine:
    """The embedded engine."""
    from estr_lite.rollout.transformers_engine import TransformersEngine

    model = Model(**spec["model"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = attach(load_base(model, device), Lora(**spec["lora"]), seed=0)
    stop = stop_tokens(model, load_tokenizer(model))
    store = AdapterFolder(Path(spec["scratch"]))
    return TransformersEngine(policy, store, stop, spec["kv"], spec["max_rows"], spec["stretch"])


def vllm_engine(spec: Mapping[str, Any]) -> Engine:
    """vLLM."""
    from estr_lite.rollout.vllm_engine import VllmEngine

    model, rank, store = Model(**spec["model"]), Lora(**spec["lora"]).rank, AdapterFolder(Path(spec["scratch"]))
    options = Vllm(**spec["vllm"])
    return VllmEngine(model, rank, spec["targets"], store, options, spec["kv"], spec["seed"], spec["cores"])


def _answer(engine: Engine, reply: Reply) -> bytes:
    header, tensors = reply
    return pack({**header, "needs": None if engine.needs == math.inf else engine.needs}, tensors)


def _told(failure: Exception) -> str:
    """A failure of ours in its own words; any other with where it came from."""
    if isinstance(failure, EngineError):
        return str(failure)
    where = traceback.extract_tb(failure.__traceback__)[-1]
    kind = "out of memory: " if "memory" in f"{type(failure).__name__} {failure}".lower() else ""
    return f"{kind}{type(failure).__name__}: {failure} ({Path(where.filename).name}, line {where.lineno})"


def _room(engine: Engine, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reply:
    return {"room": engine.room(message["rows"], message["latest"])}, {}


def _admit(engine: Engine, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reply:
    engine.admit([ticket_from_json(ticket) for ticket in message["tickets"]], Sampling(**message["sampling"]))
    return {}, {}


def _step(engine: Engine, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reply:
    advance: Advance = engine.step(message["latest"])
    finished, found = pack_rollouts([(one.ticket, one.rollouts) for one in advance.finished])
    header = {
        "finished": finished,
        "sampled": dict(advance.sampled),
        "flying": dict(advance.flying),
        "segments": [[ticket_to_json(ticket), [s.start, s.version]] for ticket, s in advance.segments],
    }
    return header, found


def _swap(engine: Engine, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reply:
    engine.swap(message["version"])
    return {}, {}


def _score(engine: Engine, message: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Reply:
    return {}, {"logp": engine.score(message["version"], tensors["token_ids"])}


OPERATIONS: dict[str, Callable[[Engine, Mapping[str, Any], Mapping[str, Tensor]], Reply]] = {
    "room": _room,
    "admit": _admit,
    "step": _step,
    "swap": _swap,
    "score": _score,
}

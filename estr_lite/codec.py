"""Values as bytes: JSON for what is small and named, tensors beside it, in one safetensors blob. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, cast

import torch
from safetensors import SafetensorError, TensorSpec, serialize
from safetensors.torch import load
from torch import Tensor

from estr_lite.types import Prompt, Rollout, Segment, Ticket

PER_TOKEN = {
    "token_ids": torch.int64,
    "logp": torch.float32,
    "entropy": torch.float32,
    "version": torch.int64,
    "action": torch.bool,
}
"""The tensors of a rollout in their order, and what they are made of."""


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """One blob of a JSON header and tensors of any layout; equal contents give equal bytes.

    Raises:
        ValueError: if the header holds NaN or an infinity; these belong into a tensor.
    """
    text = json.dumps(header, allow_nan=False)
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}  # alive while they are read
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in dense.items()
    }
    return bytes(serialize(specs, metadata={"json": text}))


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a blob that `pack` made; ValueError says what is wrong with any other."""
    try:
        tensors = load(data)  # checks that all is there; KeyError is a type that torch lacks
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{len(data)} bytes are not a whole safetensors blob: {error}.") from error
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    if "json" not in metadata:
        raise ValueError(f"The safetensors blob has no JSON header; its metadata has {sorted(metadata)}.")
    return json.loads(metadata["json"]), tensors


def ticket_to_json(ticket: Ticket) -> dict[str, Any]:
    """A ticket as JSON values."""
    prompt = ticket.prompt
    return {
        "step": ticket.step,
        "slot": ticket.slot,
        "prompt": {"uid": prompt.uid, "token_ids": list(prompt.token_ids), "reference": prompt.reference},
        "segments": [[segment.start, segment.version] for segment in ticket.segments],
        "seed": ticket.seed,
        "clamped": ticket.clamped,
    }


def ticket_from_json(value: Mapping[str, Any]) -> Ticket:
    """The ticket that `ticket_to_json` wrote."""
    prompt = value["prompt"]
    return Ticket(
        step=value["step"],
        slot=value["slot"],
        prompt=Prompt(prompt["uid"], tuple(prompt["token_ids"]), prompt["reference"]),
        segments=tuple(Segment(start, version) for start, version in value["segments"]),
        seed=value["seed"],
        clamped=value["clamped"],
    )


def pack_rollouts(items: Sequence[tuple[Ticket, Sequence[Rollout]]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Tickets with their rollouts as a header and flat tensors, for N rollouts of M tokens in all.

    Raises:
        TypeError: if a rollout's tensor is not of the type that `Rollout` says, and so would not come back as it was.
    """
    header = [{"ticket": ticket_to_json(t), "finish": [rollout.finish for rollout in found]} for t, found in items]
    rollouts = list(chain.from_iterable(found for _, found in items))
    tensors = {name: _flat(name, [getattr(r, name) for r in rollouts]) for name in PER_TOKEN}  # (M) each
    tensors["lengths"] = torch.tensor([len(rollout) for rollout in rollouts], dtype=torch.int64)  # (N)
    tensors["reward"] = torch.tensor(
        [rollout.reward for rollout in rollouts], dtype=torch.float64
    )  # (N), NaN: ungraded
    return header, tensors


def unpack_rollouts(
    header: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]
) -> list[tuple[Ticket, tuple[Rollout, ...]]]:
    """What `pack_rollouts` took; ValueError where header and tensors do not belong together."""
    missing = {*PER_TOKEN, "lengths", "reward"} - tensors.keys()
    if missing:
        raise ValueError(f"Packed rollouts have no {sorted(missing)}.")
    finishes = [finish for item in header for finish in item["finish"]]
    lengths = cast(list[int], tensors["lengths"].tolist())  # pyright: ignore[reportUnknownMemberType]
    rewards = cast(list[float], tensors["reward"].tolist())  # pyright: ignore[reportUnknownMemberType]
    expected = {name: sum(lengths) for name in PER_TOKEN} | {"lengths": len(finishes), "reward": len(finishes)}
    wrong = {name: len(tensors[name]) for name, size in expected.items() if len(tensors[name]) != size}
    if wrong:
        raise ValueError(f"Packed rollouts do not fit their header: sizes are {wrong}, expected were {expected}.")
    columns = [torch.split(tensors[name], lengths) for name in PER_TOKEN]  # views, (T_i) each
    rollouts = iter([Rollout(*row) for row in zip(*columns, finishes, rewards, strict=True)])
    return [(ticket_from_json(item["ticket"]), tuple(islice(rollouts, len(item["finish"])))) for item in header]


def _flat(name: str, tensors: Sequence[Tensor]) -> Tensor:
    for tensor in tensors:
        if tensor.dtype != PER_TOKEN[name]:
            raise TypeError(f"Rollout.{name} must be {PER_TOKEN[name]} to be packed, got {tensor.dtype}.")
    return torch.cat([torch.empty(0, dtype=PER_TOKEN[name]), *tensors])

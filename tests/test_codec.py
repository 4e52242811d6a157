"""What is packed comes back bit for bit, and what was never packed is refused by name."""

from __future__ import annotations

import json
import math
import pickle
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from estr_lite.codec import (
    PER_TOKEN,
    pack,
    pack_rollouts,
    ticket_from_json,
    ticket_to_json,
    unpack,
    unpack_rollouts,
)
from estr_lite.types import Prompt, Rollout, Segment, Ticket
from tests.builders import make_rollout, make_ticket

WORDS = {torch.int64: torch.int64, torch.float64: torch.int64, torch.float32: torch.int32}
"""What the bits of a type are drawn as: any bits make a number, among them NaN of every kind."""


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().numpy().tobytes()


def number_bits(value: float) -> bytes:
    return struct.pack("d", value)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any shape, with dimensions of length 0, sometimes transposed or every other row."""
    dtype = draw(st.sampled_from([torch.bool, *WORDS]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    words = WORDS.get(dtype, torch.uint8)
    limits = torch.iinfo(words)
    numbers = st.booleans() if dtype == torch.bool else st.integers(limits.min, limits.max)
    count = math.prod(shape)
    flat = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)), dtype=words)
    tensor = flat.view(dtype).view(shape)
    layout = draw(st.sampled_from(["as it is", "transposed", "every other"]))
    if layout == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    return tensor[::2] if layout == "every other" and shape else tensor


def column(dtype: torch.dtype, length: int) -> st.SearchStrategy[Tensor]:
    if dtype == torch.bool:
        return st.lists(st.booleans(), min_size=length, max_size=length).map(torch.tensor)
    limits = torch.iinfo(WORDS[dtype])
    numbers = st.lists(st.integers(limits.min, limits.max), min_size=length, max_size=length)
    return numbers.map(lambda found: torch.tensor(found, dtype=WORDS[dtype]).view(dtype))


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(1, 5))
    columns: dict[str, Any] = {name: draw(column(dtype, length)) for name, dtype in PER_TOKEN.items()}
    return Rollout(**columns, finish=draw(st.sampled_from(["stop", "length"])), reward=draw(st.floats()))


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    later = draw(st.lists(st.integers(1, 99), unique=True, max_size=3))
    starts = [0, *sorted(later)]
    versions = sorted(draw(st.lists(st.integers(0, 99), min_size=len(starts), max_size=len(starts))))
    prompt = Prompt(draw(st.text()), tuple(draw(st.lists(st.integers(0, 2**20), min_size=1))), draw(st.text()))
    return Ticket(
        step=draw(st.integers(0, 2**40)),
        slot=draw(st.integers(0, 2**20)),
        prompt=prompt,
        segments=tuple(map(Segment, starts, versions)),
        seed=draw(st.integers(0, 2**64 - 1)),
        clamped=draw(st.booleans()),
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(), JSON, max_size=3), st.dictionaries(st.text("abc.", min_size=1), tensors(), max_size=3)
)
def test_a_header_and_its_tensors_come_back_bit_for_bit(header: dict[str, Any], sent: dict[str, Tensor]) -> None:
    data = pack(header, sent)
    found_header, found = unpack(data)
    assert found_header == header
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in sent.items()
    }
    assert pack(found_header, found) == data


def test_views_of_one_storage_are_packed_apart_and_what_comes_back_can_be_written_to() -> None:
    base = torch.arange(6.0)
    _, found = unpack(pack({}, {"all": base, "again": base, "tail": base[3:], "odd": base[1::2]}))
    found["all"].zero_()
    assert found["again"].tolist() == base.tolist()
    assert found["tail"].tolist() == [3.0, 4.0, 5.0]
    assert found["odd"].tolist() == [1.0, 3.0, 5.0]


def test_a_parameter_is_packed_as_its_value() -> None:
    _, found = unpack(pack({}, {"w": torch.nn.Parameter(torch.ones(2))}))
    assert not found["w"].requires_grad
    assert found["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_header_that_is_not_json_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack({"loss": value}, {})


@pytest.mark.parametrize("sent", [{}, {"a": torch.arange(3), "b": torch.ones(2, 2)}], ids=["header only", "tensors"])
def test_every_shorter_piece_of_a_blob_is_refused(sent: dict[str, Tensor]) -> None:
    data = pack({"kind": "rollouts"}, sent)
    for end in range(len(data)):
        with pytest.raises(ValueError, match=f"{end} bytes are not a whole safetensors blob"):
            unpack(data[:end])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a whole safetensors blob"),
        (pickle.dumps({"a": 1}), "not a whole safetensors blob"),
        (save({"a": torch.ones(1)}), r"no JSON header; its metadata has \[\]"),
        (save({"a": torch.ones(1)}, {"format": "pt"}), r"no JSON header; its metadata has \['format'\]"),
    ],
    ids=["another protocol", "a pickle", "no metadata", "other metadata"],
)
def test_foreign_data_is_refused_by_what_it_lacks(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(data)


@given(tickets())
def test_a_ticket_comes_back_through_json(ticket: Ticket) -> None:
    assert ticket_from_json(json.loads(json.dumps(ticket_to_json(ticket)))) == ticket


@given(st.lists(st.tuples(tickets(), st.lists(rollouts(), max_size=3)), max_size=3))
def test_rollouts_come_back_bit_for_bit_graded_or_not(items: list[tuple[Ticket, list[Rollout]]]) -> None:
    header, flat = pack_rollouts(items)
    received, columns = unpack(pack({"items": header}, flat))
    found = unpack_rollouts(received["items"], columns)
    assert [ticket for ticket, _ in found] == [ticket for ticket, _ in items]
    for (_, before), (_, after) in zip(items, found, strict=True):
        for old, new in zip(before, after, strict=True):
            assert all(bits(getattr(old, name)) == bits(getattr(new, name)) for name in PER_TOKEN)
            assert (old.finish, number_bits(old.reward)) == (new.finish, number_bits(new.reward))


def test_a_rollout_of_another_type_is_refused_rather_than_rounded() -> None:
    wide = make_rollout(logp=torch.zeros(4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"Rollout\.logp must be torch\.float32 to be packed, got torch\.float64"):
        pack_rollouts([(make_ticket(), [wide])])


@pytest.mark.parametrize("name", [*PER_TOKEN, "lengths", "reward"])
def test_tensors_that_do_not_fit_their_header_are_refused(name: str) -> None:
    header, flat = pack_rollouts([(make_ticket(), [make_rollout(4), make_rollout(2)])])
    with pytest.raises(ValueError, match="do not fit their header"):
        unpack_rollouts(header, {**flat, name: flat[name][:-1]})
    with pytest.raises(ValueError, match=rf"have no \['{name}'\]"):
        unpack_rollouts(header, {key: tensor for key, tensor in flat.items() if key != name})

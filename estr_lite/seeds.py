"""Randomness is an argument: every stream derives from a seed and a name by a stable hash, never from global state.

torch's global generator is shared between threads, so a `manual_seed` in the worker would reach the trainer's weights.
"""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *name: int | str) -> int:
    """A 63-bit seed for the stream called `name` under `seed`; equal on every machine and Python version."""
    text = "/".join(str(part) for part in (seed, *name))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *name: int | str) -> torch.Generator:
    """A CPU generator of its own for the stream called `name`."""
    return torch.Generator().manual_seed(derive(seed, *name))

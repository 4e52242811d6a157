"""The only page that knows bitsandbytes: a 4-bit base for QLoRA."""

from __future__ import annotations

import torch
from transformers import BitsAndBytesConfig


def nf4_config() -> BitsAndBytesConfig:
    """NF4 with double quantisation and bfloat16 compute (QLoRA, arXiv 2305.14314)."""
    try:
        import bitsandbytes  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise ImportError("model.quantization nf4 needs bitsandbytes: pip install 'estr-lite[qlora]'.") from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )

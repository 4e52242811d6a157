"""The only page that knows bitsandbytes: a 4-bit base for QLoRA."""

from __future__ import annotations

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel


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


def keep_trainable(base: PreTrainedModel) -> None:
    """Forbid bitsandbytes to repack the weights for inference, which it does in eval mode on a CPU with AVX512-BF16.

    It would do so in place, although trainer and engine share the weights, and no gradient passes a repacked layer
    (bitsandbytes 0.50, `Linear4bit.forward` and `matmul_4bit`).
    """
    from bitsandbytes.nn.modules import Linear4bit

    for layer in base.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False

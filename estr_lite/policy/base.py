"""The frozen base model: which one, in what precision, and whether the folder really holds it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

TINY = Path(__file__).parents[1] / "assets" / "tiny"
"""The model that ships: a 0.86 M-parameter character Llama (see its card)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class Model:
    """The base model.

    Args:
        path: a Hugging Face folder, or a hub name where the hub can be reached; `tiny` is the model that ships.
        dtype: precision of the base weights; the adapter is always float32.
        quantization: `nf4` loads the base in 4 bits by bitsandbytes (QLoRA).
        attention: attention implementation, as transformers names it.
    """

    path: str = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Literal["none", "nf4"] = "none"
    attention: str = "sdpa"

    @property
    def source(self) -> str:
        """What `from_pretrained` is given."""
        return str(TINY) if self.path == "tiny" else self.path


def check_folder(model: Model) -> None:
    """Raise before any loading when a model folder cannot work; a name that is no folder is left to the hub."""
    folder = Path(model.source)
    if not folder.is_dir():
        if folder.is_absolute() or model.path.startswith("."):
            raise FileNotFoundError(f"model.path {model.path!r} is no folder.")
        return
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model.path {model.path!r} has no config.json; name a Hugging Face model folder.")
    if not any(found for pattern in _WEIGHTS for found in folder.glob(pattern)):
        raise FileNotFoundError(
            f"model.path {model.path!r} has no weights: expected a *.safetensors file beside config.json."
        )


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The model's tokenizer."""
    check_folder(model)
    return AutoTokenizer.from_pretrained(model.source)


def load_base(model: Model, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The frozen base in eval mode; safetensors only."""
    check_folder(model)
    options: dict[str, object] = {}
    if model.quantization == "nf4":
        from estr_lite.policy.quantized import nf4_config

        options["quantization_config"] = nf4_config()
    base = AutoModelForCausalLM.from_pretrained(
        model.source,
        dtype=DTYPES[model.dtype],
        attn_implementation=model.attention,
        use_safetensors=True,
        **options,
    )
    base.requires_grad_(False)
    base.eval()
    if model.quantization == "nf4":
        from estr_lite.policy.quantized import keep_trainable

        keep_trainable(base)
    return base if model.quantization == "nf4" else base.to(torch.device(device))  # pyright: ignore[reportArgumentType]


def context_length(model: Model) -> int:
    """The most tokens that prompt and completion may have together."""
    return int(AutoConfig.from_pretrained(model.source).max_position_embeddings)


def stop_tokens(model: Model, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token id that ends a completion: the tokenizer's eos and the generation config's."""
    try:
        found = GenerationConfig.from_pretrained(model.source).eos_token_id
    except OSError:  # a folder without generation_config.json
        found = None
    ids: list[Any] = [tokenizer.eos_token_id, *(found if isinstance(found, list) else [found])]
    return frozenset(int(i) for i in ids if i is not None)


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file."""
    return json.loads(path.read_text("utf-8"))

"""The tiny model that ships, made again from nothing: `python -m estr_lite.tiny --out FOLDER`.

A character-level Llama, 128 wide, 4 layers, 0.86 M parameters, warmed up on traces that are mostly aimless: 30 % of the
countdown traces aim at the target and 70 % are random but correct arithmetic, so the model computes well and chooses
badly. That leaves room for reinforcement learning, and puts its entropy where the choices are.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from estr_lite.seeds import derive
from estr_lite.tasks import arithmetic, countdown
from estr_lite.tasks.steps import Step

EOS = "<eos>"
CHARACTERS = "0123456789+-*/=;,>: "
CONTEXT = 256


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; pad is eos, as in many real models, so masks must go by position."""
    vocabulary = {token: i for i, token in enumerate([EOS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=EOS, padding_side="left", model_max_length=CONTEXT
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """The untrained model."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def trace(index: int, seed: int, aimed: float, slips: float) -> tuple[str, str]:
    """A warm-up example: the problem's text and a completion, aimed at the answer or not."""
    rng = random.Random(derive(seed, "trace", index))
    if rng.random() < 0.85:
        problem, steps = countdown.make(countdown.Countdown(), "train", rng.randrange(10**9))
        if rng.random() >= aimed:
            numbers = [int(n) for n in problem.reference.split(">")[0].split(",")]
            steps = countdown.walk(numbers, rng) or steps
    else:
        problem, steps = arithmetic.make(arithmetic.Arithmetic(), "train", rng.randrange(10**9))
        if rng.random() < slips:
            last = steps[-1]
            wrong = max(0, last.result + rng.choice((-10, -2, -1, 1, 2, 10)))
            steps = (*steps[:-1], Step(last.left, last.operator, last.right, wrong))
    return problem.text, ";".join(map(str, steps))


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, batch: int, seed: int) -> None:
    """Supervised training on traces: next-token loss on the completion, AdamW, cosine from 3e-3."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.05)
    started = time.monotonic()
    for step in range(steps):
        rows = [trace(step * batch + i, seed, aimed=0.3, slips=0.6) for i in range(batch)]
        prompts = [tokenizer.encode(prompt) for prompt, _ in rows]
        answers = [[*tokenizer.encode(answer), 0] for _, answer in rows]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        ids = torch.zeros(batch, width, dtype=torch.long)
        labels = torch.full((batch, width), -100)
        for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(p) + len(a)] = torch.tensor(p + a)
            labels[row, len(p) : len(p) + len(a)] = torch.tensor(a)
        logits = model(input_ids=ids).logits  # (B, S, V); causal, so padding on the right needs no mask
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, must not exist")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"--out {args.out} exists; name a folder that does not.")
    tokenizer, model = make_tokenizer(), make_model(args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    warm_up(model, tokenizer, args.steps, args.batch, args.seed)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()

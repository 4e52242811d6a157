"""The vLLM engine, in this process: LoRA hot-swap, exact behaviour entropy, in-flight swaps at exact tokens.

The only page that knows vLLM (0.32). Four of its extension points are used: a logits processor reads the entropy of
the distribution that is sampled, a scheduler that can hold requests stops them at the token where their adapter
changes, adapters are loaded under a name of their own for every cohort, so that no prefix cache outlives a swap, and on
a CPU the LoRA products are grouped by adapter.

Between two engine steps nothing runs: that is where a swap goes, and why every token's version is exact.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

# In this process: the thread that builds the engine drives it. Set before vLLM is imported, which reads them once.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # runner V2 has another interface for custom logits processors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # failures are ours to tell; vLLM would dump its whole state
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import EngineArgs, RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from estr_lite.distribution import entropy, log_softmax
from estr_lite.policy.adapter import Versions
from estr_lite.policy.base import Model, context_length, load_tokenizer, stop_tokens
from estr_lite.rollout.engine import (
    Advance,
    Engine,
    EngineError,
    Finished,
    Sampling,
    Vllm,
    next_switch,
    turn,
    version_at,
)
from estr_lite.seeds import derive
from estr_lite.staleness import KvCache
from estr_lite.types import Rollout, Segment, Ticket

ROW = "estr_lite_row"
LANES = 8
"""Cohorts in flight, each with an adapter slot of its own."""


PREFILL_TOKENS = 8192
"""Most tokens of one engine step."""


class EntropyTap(LogitsProcessor):
    """Writes the entropy of every sampled distribution into a table that the engine reads, and changes nothing.

    vLLM applies argmax-invariant processors to the temperature-scaled logits of the whole batch. It hands out copies of
    the sampling parameters, so a row is found by a number in their `extra_args`.
    """

    table: Tensor  # (rows, context) float32; set by the engine before vLLM builds its processors

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, list[int]]] = {}  # batch index -> (row, its output tokens so far, live)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            row = (params.extra_args or {}).get(ROW)
            self._rows.pop(index, None)
            if row is not None:
                self._rows[index] = (row, output)
        for source, target, direction in batch_update.moved:
            a, b = self._rows.pop(source, None), self._rows.pop(target, None)
            if a is not None:
                self._rows[target] = a
            if direction == MoveDirectionality.SWAP and b is not None:
                self._rows[source] = b

    def apply(self, logits: Tensor) -> Tensor:
        spread = entropy(log_softmax(logits, 1.0)).cpu()  # (batch), the logits are scaled already
        index = list(self._rows)
        rows = [self._rows[i][0] for i in index]
        positions = [len(self._rows[i][1]) for i in index]
        self.table[rows, positions] = spread[index]
        return logits


class HoldingScheduler(Scheduler):
    """vLLM's scheduler, but requests in `held` stay out of the next step; their keys and values stay in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: set[str] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        aside = [request for request in self.running if request.request_id in self.held]
        self.running[:] = [request for request in self.running if request.request_id not in self.held]
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.running.extend(aside)


class GroupedLora(PunicaWrapperCPU):
    """LoRA on the CPU with one product an adapter; vLLM's own copies the adapter's weights once a token."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        indices = self.token_lora_indices  # (tokens), -1 without an adapter
        found = [int(index) for index in indices.unique() if index >= 0]
        whole = len(found) == 1 and bool((indices == found[0]).all())
        self._groups = [(i, slice(None) if whole else (indices == i).nonzero().squeeze(1)) for i in found]

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        """y += scale · x Aᵀ Bᵀ, by each row's adapter: x (tokens, in), A (slots, 1, r, in), B (slots, 1, out, r)."""
        for index, rows in self._groups:
            own, start = x[rows], 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                low = own.to(a.dtype) @ a[index, 0].T  # (rows, r)
                y[rows, start : start + size] += (scale * (low @ b[index, 0, :size].T)).to(y.dtype)
                start += size


@dataclass(eq=False)
class _Row:
    """One rollout in flight."""

    number: int  # its row of the entropy table
    ticket: Ticket
    rollout: int
    request: str = ""  # vLLM's id
    before: int = 0  # tokens that earlier requests of this rollout sampled
    token_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)  # of earlier requests
    finish: str = ""


@dataclass(eq=False)
class _Cohort:
    """Rows that share their segments, and the adapter slot that they decode with."""

    tickets: Sequence[Ticket]
    sampling: Sampling
    rows: list[_Row]
    segments: tuple[Segment, ...]
    adapter: int = 0  # vLLM's LoRA id, never used twice
    at: int = 0  # the token at which the present segment began
    tally: Counter[int] = field(default_factory=Counter)  # tokens by version
    held: set[str] = field(default_factory=set)

    @property
    def version(self) -> int:
        return version_at(self.segments, self.at)

    @property
    def switch(self) -> int | None:
        """The token at which the next version takes over."""
        return next_switch(self.segments, self.at)

    @property
    def live(self) -> list[_Row]:
        return [row for row in self.rows if not row.finish]


class VllmEngine(Engine):
    """Drives one in-process vLLM engine.

    Args:
        model: the base model.
        rank: LoRA rank, one of those vLLM takes.
        targets: names of the modules that have LoRA. The head must not be one: vLLM's LoRA of the head and its prompt
            log-probabilities, which the canary reads, do not work together.
        store: where adapter versions come from.
        options: memory and size.
        kv: what an in-flight swap does with keys and values. `recompute` starts each segment as a new request.
        seed: of vLLM's own generators; every request also has a seed of its own.
        cores: CPU cores that vLLM may use.

    Raises:
        EngineError: if vLLM cannot start, for instance for want of memory for the KV cache.
    """

    lanes, patience = LANES, 0.0

    def __init__(
        self,
        model: Model,
        rank: int,
        targets: Sequence[str],
        store: Versions,
        options: Vllm,
        kv: KvCache,
        seed: int,
        cores: Sequence[int],
    ) -> None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # in whole GiB, and it would go before `kv_gib`
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        self._store, self.kv = store, kv
        self._context = context_length(model)
        EntropyTap.table = torch.full((options.max_rows, self._context + 1), torch.nan)
        self._stop = sorted(stop_tokens(model, load_tokenizer(model)))
        self._engine = _start(model, rank, targets, options, seed, self._context)
        core: Any = self._engine.engine_core
        self._scheduler: HoldingScheduler = core.engine_core.scheduler
        self.max_rows = _capacity(self._engine, options, self._context)
        self._free = list(range(options.max_rows))
        self._cohorts: list[_Cohort] = []
        self._by_request: dict[str, tuple[_Cohort, _Row]] = {}
        self._sampled = Counter[int]()  # tokens by version, since the last step
        self._began = list[tuple[Ticket, Segment]]()  # segments, since the last step
        self._ids = count(1)
        self._probe: Tensor | None = None

    # the protocol

    def room(self, rows: int, latest: int) -> bool:
        used = sum(len(cohort.live) for cohort in self._cohorts)
        return used + rows <= self.max_rows and len(self._cohorts) < LANES

    def admit(self, tickets: Sequence[Ticket], sampling: Sampling) -> None:
        rows = [_Row(self._free.pop(), t, i) for t in tickets for i in range(sampling.rollouts)]
        cohort = _Cohort(tickets, sampling, rows, tickets[0].segments)
        self._cohorts.append(cohort)
        self._began.append((cohort.tickets[0], cohort.segments[0]))
        self._submit(cohort)

    @property
    def needs(self) -> float:
        waits = ((self._next_version(c) if self._waits(c) else c.version) for c in self._cohorts)
        return min(waits, default=math.inf)

    def step(self, latest: int) -> Advance:
        for cohort in self._cohorts:
            if self._waits(cohort) and self._next_version(cohort) <= latest:
                self._swap(cohort)
        if any(len(cohort.held) < len(cohort.live) for cohort in self._cohorts):
            self._pump()
        done = [cohort for cohort in self._cohorts if not cohort.live]
        for cohort in done:
            self._cohorts.remove(cohort)
            self._engine.remove_lora(cohort.adapter)
        finished = [one for cohort in done for one in self._finished(cohort)]
        flying = sum((cohort.tally for cohort in self._cohorts), Counter[int]())
        advance = Advance(finished, self._sampled, flying, self._began)
        self._sampled, self._began = Counter(), []
        return advance

    def swap(self, version: int) -> None:
        for cohort in self._cohorts:
            if cohort.live:
                token = max(len(row.token_ids) for row in cohort.live)
                self._turn(cohort, token, version)

    def _turn(self, cohort: _Cohort, token: int, version: int) -> None:
        """From `token` on, which no live row has passed, `version` samples: rows wait there for those behind."""
        cohort.segments = turn(cohort.segments, token, version)
        if token == 0:
            self._load(cohort.adapter, version, inplace=True)
            return
        for row in cohort.live:
            if len(row.token_ids) == token:
                self._hold(cohort, row)

    def score(self, version: int, token_ids: Tensor) -> Tensor:
        adapter = self._load(next(self._ids), version)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        name = f"probe-{adapter.lora_int_id}"
        self._probe = None
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=token_ids.tolist()), params, lora_request=adapter)
        while self._probe is None:
            self._pump()
        self._engine.remove_lora(adapter.lora_int_id)
        return self._probe

    def close(self) -> None:
        """Shut vLLM down and give its memory back."""
        self._engine.engine_core.shutdown()
        self._cohorts.clear()

    # adapters

    def _load(self, number: int, version: int, inplace: bool = False) -> LoRARequest:
        adapter = LoRARequest(f"estr-lite-{number}", number, str(self._store.folder(version)), load_inplace=inplace)
        self._engine.add_lora(adapter)
        return LoRARequest(adapter.lora_name, number, adapter.lora_path)

    def _swap(self, cohort: _Cohort) -> None:
        """Every live row stands at the switch: give them the next version and let them go on."""
        assert cohort.switch is not None
        cohort.at = cohort.switch
        self._began.append((cohort.tickets[0], Segment(cohort.at, cohort.version)))
        self._scheduler.held -= cohort.held
        cohort.held.clear()
        if self.kv == "keep":
            self._load(cohort.adapter, cohort.version, inplace=True)
            return
        for row in cohort.live:  # the keys and values go with the request; a new one computes them again
            self._engine.abort_request([row.request], internal=True)
            del self._by_request[row.request]
            row.entropy.append(EntropyTap.table[row.number, : len(row.token_ids) - row.before].clone())
            row.before = len(row.token_ids)
        self._engine.remove_lora(cohort.adapter)
        self._submit(cohort)

    # requests

    def _submit(self, cohort: _Cohort) -> None:
        """A request for every live row, from the tokens it has so far."""
        cohort.adapter = next(self._ids)
        adapter = self._load(cohort.adapter, cohort.version)
        greedy = cohort.sampling.temperature == 0
        for row in cohort.live:
            params = SamplingParams(
                temperature=cohort.sampling.temperature,
                seed=None if greedy else derive(row.ticket.seed, "vllm", row.rollout, row.before),
                max_tokens=cohort.sampling.max_tokens - row.before,
                logprobs=0,
                stop_token_ids=self._stop,
                ignore_eos=True,  # eos is among the stop tokens
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={ROW: row.number},
            )
            prompt = TokensPrompt(prompt_token_ids=[*row.ticket.prompt.token_ids, *row.token_ids])
            name = f"{cohort.adapter}-{row.number}"
            row.request = self._engine.add_request(name, prompt, params, lora_request=adapter)
            self._by_request[name] = (cohort, row)
            self._by_request[row.request] = (cohort, row)

    def _pump(self) -> None:
        """One engine step: a token for every request that is not held."""
        for output in self._engine.step():
            assert isinstance(output, RequestOutput)
            if output.request_id in self._by_request:
                self._take(*self._by_request[output.request_id], output)
            elif output.finished and output.prompt_logprobs:
                self._probe = _prompt_logp(output)

    def _take(self, cohort: _Cohort, row: _Row, output: RequestOutput) -> None:
        (completion,) = output.outputs
        count = len(completion.token_ids)
        row.token_ids += completion.token_ids
        row.version += [cohort.version] * count
        cohort.tally[cohort.version] += count
        self._sampled[cohort.version] += count
        entries: Any = completion.logprobs or ()
        row.logp += [entry[token].logprob for token, entry in zip(completion.token_ids, entries, strict=True)]
        if output.finished:
            row.finish = "stop" if completion.finish_reason == "stop" else "length"
            row.entropy.append(EntropyTap.table[row.number, : len(row.token_ids) - row.before].clone())
            EntropyTap.table[row.number] = torch.nan
            self._free.append(row.number)
            for name in [name for name, (_, other) in self._by_request.items() if other is row]:
                del self._by_request[name]
        elif len(row.token_ids) == cohort.switch:
            self._hold(cohort, row)

    def _hold(self, cohort: _Cohort, row: _Row) -> None:
        cohort.held.add(row.request)
        self._scheduler.held.add(row.request)

    # cohorts

    def _waits(self, cohort: _Cohort) -> bool:
        return bool(cohort.held) and len(cohort.held) == len(cohort.live)

    def _next_version(self, cohort: _Cohort) -> int:
        assert cohort.switch is not None
        return version_at(cohort.segments, cohort.switch)

    def _finished(self, cohort: _Cohort) -> Iterator[Finished]:
        size = cohort.sampling.rollouts
        for i, ticket in enumerate(cohort.tickets):
            ticket = replace(ticket, segments=cohort.segments)
            yield Finished(ticket, tuple(_rollout(row) for row in cohort.rows[i * size : (i + 1) * size]))


def _prompt_logp(output: RequestOutput) -> Tensor:
    """(N-1) log-probabilities of a prompt's tokens but the first, for which vLLM has None."""
    pairs = list(zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=True))
    return torch.tensor([entry[token].logprob for token, entry in pairs if entry is not None])


def _rollout(row: _Row) -> Rollout:
    return Rollout(
        token_ids=torch.tensor(row.token_ids),
        logp=torch.tensor(row.logp),
        entropy=torch.cat(row.entropy),
        version=torch.tensor(row.version),
        action=torch.ones(len(row.token_ids), dtype=torch.bool),
        finish="stop" if row.finish == "stop" else "length",
        reward=float("nan"),
    )


def _start(model: Model, rank: int, targets: Sequence[str], options: Vllm, seed: int, context: int) -> LLMEngine:
    arguments = EngineArgs(
        model=model.source,
        skip_tokenizer_init=True,  # token ids in, token ids out
        dtype=model.dtype,
        quantization="bitsandbytes" if model.quantization == "nf4" else None,
        seed=seed,
        max_model_len=context,
        max_num_seqs=options.max_rows,
        gpu_memory_utilization=options.memory,
        kv_cache_memory_bytes=int(options.kv_gib * 2**30) if current_platform.is_cpu() else None,
        enforce_eager=options.eager,
        enable_prefix_caching=True,
        enable_chunked_prefill=False,  # a prompt split in two makes vLLM rewind a seeded generator, which CPUs cannot
        max_num_batched_tokens=max(PREFILL_TOKENS, context),
        async_scheduling=False,
        scheduler_cls=HoldingScheduler,
        logits_processors=[EntropyTap],
        logprobs_mode="processed_logprobs",  # at the sampling temperature; the default is raw
        generation_config="vllm",  # no sampling defaults from the model folder
        enable_lora=True,
        max_lora_rank=rank,  # pyright: ignore[reportArgumentType]  # one of vLLM's, checked before
        lora_target_modules=list(targets),
        max_loras=LANES + 1,  # the canary has a slot too
        max_cpu_loras=2 * LANES + 2,
        disable_log_stats=True,
    )
    if current_platform.is_cpu():
        kernels = f"{GroupedLora.__module__}.{GroupedLora.__qualname__}"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: kernels)  # pyright: ignore
    try:
        return LLMEngine.from_engine_args(arguments)
    except Exception as failure:
        raise EngineError(f"vLLM could not start: {str(failure).rstrip('.')}.{_advice(failure, options)}") from failure


def _advice(failure: Exception, options: Vllm) -> str:
    """What would do where vLLM met its limits of memory, which it names by flags of its own."""
    text = str(failure).lower()
    if "memory" not in text and "kv cache" not in text and not isinstance(failure, MemoryError):
        return ""
    small = "larger than the available kv cache" in text or "no available memory for the cache" in text
    if current_platform.is_cpu():
        return f" {'Raise' if small else 'Lower'} vllm.kv_gib (now {options.kv_gib:g})."
    return f" Raise vllm.memory (now {options.memory:g}) or lower vllm.max_rows (now {options.max_rows})."


def _capacity(engine: LLMEngine, options: Vllm, context: int) -> int:
    """Rows that the KV cache holds at full length, so that no request is ever preempted."""
    cache = engine.vllm_config.cache_config
    blocks = (cache.num_gpu_blocks or 0) - 1
    rows = min(options.max_rows, blocks // -(-context // cache.block_size))
    if rows < 1:
        raise EngineError(
            f"vLLM's KV cache has {blocks} blocks of {cache.block_size} tokens, too few for one sequence of {context} "
            f"tokens. Raise vllm.kv_gib (now {options.kv_gib:g}) on a CPU or vllm.memory (now {options.memory:g}) "
            "on a GPU."
        )
    return rows

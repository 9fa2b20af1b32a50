"""Benchmark of greedy generation end to end: a decoder with softmax against mixtures with half the heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from mgk.benchmark.attention import Comparison
from mgk.benchmark.correctness import WrongResultError
from mgk.benchmark.timing import Candidate, Clock, Effort, HostClock, Report, Timing, no_report, take_turns
from mgk.benchmark.yardstick import Record
from mgk.models import MGKForCausalLM, architecture
from mgk.ops import softmax_kernel
from mgk.training.result import device_name

LEAST_AGREEMENT = 0.05
"""Largest gap in nats between a generated token and the most likely one of the model without a cache."""
CHECKED_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The decoder, and the lengths of prompts and continuations."""

    batch: int
    prompt: int
    """Number of tokens in every prompt."""
    new_tokens: int
    layers: int = 12
    hidden_size: int = 1024
    heads: int = 16
    """Number of heads of softmax; mixtures have half."""
    head_dim: int = 64
    vocab_size: int = 32_000

    def facts(self) -> dict[str, Any]:
        """Return the entries of a row of the JSON, except the heads."""
        return {
            "batch": self.batch,
            "tokens": self.prompt + self.new_tokens,
            "prompt": self.prompt,
            "new_tokens": self.new_tokens,
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "head_dim": self.head_dim,
            "causal": True,
        }


@dataclass(frozen=True, kw_only=True)
class Writer:
    """The kind of attention of a generating model."""

    attention: str
    heads: int
    backend: str = "auto"
    """Backend of :func:`mgk.mixture_attention`."""
    is_baseline: bool = False
    """Whether the others are compared with it."""

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.heads} through {self.backend}"


def writers(presets: Sequence[str], setting: Setting, device: torch.device) -> list[Writer]:
    """Softmax on the stock kernels, on a GPU also on our own kernel for a step, and the presets."""
    own = ("sdpa", "triton") if device.type == "cuda" else ("sdpa",)
    softmax = [Writer(attention="softmax", heads=setting.heads, backend=each, is_baseline=True) for each in own]
    return [*softmax, *(Writer(attention=preset, heads=setting.heads // 2) for preset in presets)]


class Generation:
    """A model that continues random prompts with a static cache, compiled on a GPU as in transformers.

    Args:
        writer: the kind of attention.
        setting: the decoder and its lengths.
        device: device of the model.

    Raises:
        WrongResultError: if it generates tokens that the same model without a cache would not.
    """

    def __init__(self, writer: Writer, setting: Setting, device: torch.device) -> None:
        self.writer, self.setting, self.device = writer, setting, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = architecture(
            "modern", attention=writer.attention, num_attention_heads=writer.heads, head_dim=setting.head_dim,
            hidden_size=setting.hidden_size, num_hidden_layers=setting.layers,
            intermediate_size=_gated_width(setting.hidden_size), vocab_size=setting.vocab_size,
            max_position_embeddings=setting.prompt + setting.new_tokens,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self.model = MGKForCausalLM(config).to(self.dtype).eval()
        self.model.set_attn_implementation(BACKENDS[writer.backend])
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(1, setting.vocab_size, (setting.batch, setting.prompt), generator=generator)
        self.prompts = prompts.to(device)
        # All calls share one cache, because for another one a CUDA graph would be captured again.
        self._cache = StaticCache(config=config, max_cache_len=setting.prompt + setting.new_tokens)
        self.regret = self._check()

    def candidates(self) -> list[Candidate]:
        """Return what to time: the whole generation, and the prompt with its first token, which is no step."""
        count = self.setting.new_tokens
        return [
            Candidate(name=f"{self.writer.name}, all", call=lambda: self.write(count)),
            Candidate(name=f"{self.writer.name}, prompt", call=lambda: self.write(1)),
        ]

    def write(self, count: int) -> Tensor:
        """Generate ``count`` tokens after the prompts, return all, and wait for the device."""
        self._cache.reset()
        tokens = self.model.generate(
            self.prompts, max_new_tokens=count, min_new_tokens=count, do_sample=False, past_key_values=self._cache,
            pad_token_id=0,
        )  # fmt: skip
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return tokens

    def cache_bytes(self) -> int:
        """Bytes of keys and values in the cache."""
        held = [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.no_grad()
    def _check(self) -> float:
        """Return the largest gap in nats between a generated token and the most likely one without a cache."""
        tokens = self.write(self.setting.new_tokens)
        kept = self.setting.prompt + min(CHECKED_TOKENS, self.setting.new_tokens)
        worst = 0.0
        for row in tokens[:, :kept]:
            logits = self.model(row[None, :-1], use_cache=False, logits_to_keep=kept - self.setting.prompt).logits[0]
            logits = logits.float().log_softmax(-1)
            taken = logits.gather(-1, row[self.setting.prompt :, None])[:, 0]
            worst = max(worst, float((logits.amax(-1) - taken).max()))
        if not worst <= LEAST_AGREEMENT:
            reason = f"a token must be the likeliest within {LEAST_AGREEMENT:g} nats, got one {worst:.2g} below"
            raise WrongResultError(reason, {"regret": worst})
        return worst


BACKENDS = {"auto": "sdpa", "sdpa": "sdpa", "triton": "triton"}
"""Names of the backends in transformers."""


def _gated_width(hidden_size: int) -> int:
    """Width of a gated MLP with as many weights as a plain one of four times the hidden size."""
    return -(-hidden_size * 8 // 3 // 64) * 64


@softmax_kernel.ignored()
def compare(
    chosen: Sequence[Writer],
    setting: Setting,
    *,
    device: torch.device,
    effort: Effort,
    clock: Clock | None = None,
    report: Report = no_report,
) -> Comparison:
    """Check every model, then time the correct ones in turn."""
    found = Comparison()
    total = len(chosen) + effort.rounds
    models: list[Generation] = []
    for number, writer in enumerate(chosen):
        report(number, total, f"checking {writer.name}")
        try:
            model = Generation(writer, setting, device)
            for candidate in model.candidates():
                candidate.call()
            models.append(model)
        except WrongResultError as error:
            found.failures.append(
                {**_facts(writer, setting, device), "reason": str(error), "error": error.errors}
            )  # fmt: skip
    timings = take_turns(
        [candidate for model in models for candidate in model.candidates()], clock or HostClock(), effort,
        lambda done, _, text: report(len(chosen) + done, total, text),
    )  # fmt: skip
    report(total, total, "done")
    records = [_record(model, timings) for model in models]
    found.baselines.extend(record for record in records if "kernel" in record)
    if not found.baselines:
        raise RuntimeError("softmax must write beside the mixtures, got none that is right")
    fastest = max(found.baselines, key=lambda record: record["tokens_per_second"])
    for record in records:
        if "kernel" not in record:
            found.rows.append(
                {
                    **record,
                    "baseline": fastest["kernel"],
                    "baseline_heads": fastest["heads"],
                    "baseline_ms": fastest["forward_ms"],
                    "forward_ratio": fastest["forward_ms"] / record["forward_ms"],
                    "step_ratio": fastest["step_ms"] / record["step_ms"],
                    "training_ratio": None,
                    "cache_ratio": record["cache_bytes"] / fastest["cache_bytes"],
                }
            )
    return found


def _facts(writer: Writer, setting: Setting, device: torch.device) -> Record:
    return {
        "device": device_name(device),
        **setting.facts(),
        "preset": writer.attention,
        "heads": writer.heads,
        **({"kernel": writer.backend} if writer.is_baseline else {"backend": writer.backend}),
    }


def _record(model: Generation, timings: dict[str, Timing]) -> Record:
    whole, prompt = (timings[candidate.name] for candidate in model.candidates())
    setting = model.setting
    return {
        **_facts(model.writer, setting, model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "forward_ms": whole.ms,
        "prompt_ms": prompt.ms,
        "step_ms": (whole.ms - prompt.ms) / (setting.new_tokens - 1),
        "tokens_per_second": 1e3 * setting.batch * setting.new_tokens / whole.ms,
        "cache_bytes": model.cache_bytes(),
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "samples": whole.samples,
        "noise": whole.noise,
        "error": {"regret": model.regret},
        "peak_bytes": None,
    }

"""The Retrieval model, with our attention or with a stock kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mgk import recipes
from mgk.benchmark.contestants import KERNELS
from mgk.benchmark.correctness import WrongResultError, relative_error
from mgk.benchmark.timing import Candidate
from mgk.benchmark.training_step import TrainingStep, allocated_bytes
from mgk.evaluation.inference import inference
from mgk.models import MGKConfig, MGKForSequencePairClassification, architecture
from mgk.models.attention import MGKAttention

RECIPE = "lra/retrieval"

# Relative RMS error of the gradient of all weights together, against fp32 with materialised attention.
GRADIENT_CAP = {None: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-1}

PAIRS_AT_ONCE = 2
"""So many are materialised at a time."""


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """Which model."""

    attention: str
    """A preset."""
    heads: int
    kernel: str | None = None
    """A stock kernel in place of the library's attention."""
    implementation: str | None = None
    """What transformers calls the backend of a softmax that is compared with; ``None``: what `auto` picks."""
    drops_out: bool = False
    """Whether it has the dropout of the recipe, or none."""

    @property
    def name(self) -> str:
        through = "" if self.kernel is None else f" through SDPA {self.kernel}"
        through = f" through {self.implementation}" if self.implementation is not None else through
        return f"{self.attention}-{self.heads}{through}{', dropout of the recipe' if self.drops_out else ''}"

    @property
    def is_baseline(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.kernel is not None or self.implementation is not None

    def configurations(self) -> tuple[Any, MGKConfig]:
        """Of the run, and of its model."""
        none = ["model.dropout=0.0", "model.attention_dropout=0.0", "model.activation_dropout=0.0"]
        changes = [] if self.drops_out else none
        run = recipes.load(RECIPE).config(f"{self.attention}-{self.heads}", changes)
        return run, architecture(run.model.architecture, **run.model.changes)


def random_pairs(pairs: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """A batch of documents of random bytes, ``[B, N]`` each, none of them padded, and labels ``[B]``."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        name: torch.randint(1, 256, (pairs, tokens), generator=generator) for name in ("input_ids", "pair_input_ids")
    }
    batch["labels"] = torch.randint(2, (pairs,), generator=generator)
    return {name: tensor.to(device) for name, tensor in batch.items()}


class MatcherStep(TrainingStep):
    """An update of one model on one batch.

    Args:
        matcher: which model.
        batch: on the device.
        device: where.

    Raises:
        WrongResultError: if loss or gradients are not those of the formula.
    """

    def __init__(self, matcher: Matcher, batch: dict[str, Tensor], device: torch.device) -> None:
        before = allocated_bytes(device)
        self.matcher = matcher
        run, config = matcher.configurations()
        torch.manual_seed(0)
        model = MGKForSequencePairClassification(config).to(device)
        if matcher.kernel is not None:
            _attend_with(KERNELS[matcher.kernel], model)
        if matcher.implementation is not None:
            model.set_attn_implementation(matcher.implementation)
        super().__init__(model, batch, len(batch["labels"]), run)
        self.error = self._check(config)
        self.peak_bytes = self.measure_peak(before)
        self.is_recorded = self.record()

    def candidates(self) -> list[Candidate]:
        """What there is to time. Dropout changes nothing in evaluation, so only models without have that."""
        found = [Candidate(name=f"{self.matcher.name}, training", call=self.train)]
        if not self.matcher.drops_out:
            found.append(
                Candidate(name=f"{self.matcher.name}, evaluation", call=self._evaluate, context=self._inference)
            )
        return found

    def _evaluate(self) -> Tensor:
        return self.model(input_ids=self.batch["input_ids"], pair_input_ids=self.batch["pair_input_ids"]).logits

    @contextmanager
    def _inference(self) -> Iterator[None]:
        with inference(self.model, self.device, self.precision):
            yield

    def _check(self, config: MGKConfig) -> float | None:
        """The error of the gradient; ``None`` with dropout, where there is nothing to compare with."""
        loss, gradient = self.loss_and_gradient()
        if not bool(loss.isfinite() & gradient.isfinite().all()):
            raise WrongResultError("loss and gradient must be finite, got others", {})
        if self.matcher.drops_out:
            return None
        error = relative_error(gradient, self._exact_gradient(config).double())
        cap = GRADIENT_CAP[self.precision]
        if not error <= cap:
            reason = f"the error of the gradient must be at most {cap:g}, got {error:.2g}"
            raise WrongResultError(reason, {"gradient": error})
        return error

    def _exact_gradient(self, config: MGKConfig) -> Tensor:
        """That of the same weights in fp32 with attention as the paper writes it, flat."""
        # A copy, or the model that is timed would be told the same.
        model = MGKForSequencePairClassification(copy.deepcopy(config))
        model.set_attn_implementation("eager")
        model.load_state_dict(self.model.state_dict())
        model.to(self.device).train()
        for start in range(0, len(self.batch["labels"]), PAIRS_AT_ONCE):
            part = {name: tensor[start : start + PAIRS_AT_ONCE] for name, tensor in self.batch.items()}
            model(**part, num_items_in_batch=self._targets).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def _attend_with(kernel: SDPBackend, model: MGKForSequencePairClassification) -> None:
    """Have a softmax model attend through one stock kernel, whatever the library would choose."""
    for module in model.modules():
        if isinstance(module, MGKAttention):
            module.attend = _stock_attend(module, kernel)  # type: ignore[method-assign]


def _stock_attend(module: MGKAttention, kernel: SDPBackend) -> Callable[..., tuple[Tensor, None]]:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        dropout = module.dropout if module.training else 0.0
        # Inside, where the compiler sees it: models of several kernels would share what it makes of the first.
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k[:, :, 0], v, dropout_p=dropout)
        return module.out_proj(out.transpose(1, 2).flatten(2)), None

    return attend

"""The Retrieval model with our attention or with a stock kernel."""

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
"""Number of pairs that are materialised at a time."""


@dataclass(frozen=True, kw_only=True)
class Matcher:
    """The kind of a model."""

    attention: str
    """A preset."""
    heads: int
    kernel: str | None = None
    """Stock kernel in place of the library's attention."""
    implementation: str | None = None
    """Transformers' name of the backend of a softmax baseline; ``None`` is the choice of `auto`."""
    drops_out: bool = False
    """Whether it has the dropout of the recipe; otherwise it has none."""

    @property
    def name(self) -> str:
        through = "" if self.kernel is None else f" through SDPA {self.kernel}"
        through = f" through {self.implementation}" if self.implementation is not None else through
        return f"{self.attention}-{self.heads}{through}{', dropout of the recipe' if self.drops_out else ''}"

    @property
    def is_baseline(self) -> bool:
        """Whether the others are compared with it."""
        return self.kernel is not None or self.implementation is not None

    def configurations(self) -> tuple[Any, MGKConfig]:
        """Return the configurations of the run and of its model."""
        none = ["model.dropout=0.0", "model.attention_dropout=0.0", "model.activation_dropout=0.0"]
        changes = [] if self.drops_out else none
        run = recipes.load(RECIPE).config(f"{self.attention}-{self.heads}", changes)
        return run, architecture(run.model.architecture, **run.model.changes)


def random_pairs(pairs: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """Return a batch of pairs of random bytes, ``[B, N]`` each, without padding, and labels ``[B]``."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        name: torch.randint(1, 256, (pairs, tokens), generator=generator) for name in ("input_ids", "pair_input_ids")
    }
    batch["labels"] = torch.randint(2, (pairs,), generator=generator)
    return {name: tensor.to(device) for name, tensor in batch.items()}


class MatcherStep(TrainingStep):
    """A training step of one model on one batch.

    Args:
        matcher: the kind of model.
        batch: batch on the device.
        device: device of the model.

    Raises:
        WrongResultError: if loss or gradients disagree with the formula.
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
        """Return what to time. Evaluation is timed only without dropout, which does not affect it."""
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
        """Return the error of the gradient; ``None`` with dropout, for which there is no reference."""
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
        """Return the flat gradient of the same weights in fp32, with attention written like the paper's equations."""
        # The configuration is copied, so that the timed model does not change as well.
        model = MGKForSequencePairClassification(copy.deepcopy(config))
        model.set_attn_implementation("eager")
        model.load_state_dict(self.model.state_dict())
        model.to(self.device).train()
        for start in range(0, len(self.batch["labels"]), PAIRS_AT_ONCE):
            part = {name: tensor[start : start + PAIRS_AT_ONCE] for name, tensor in self.batch.items()}
            model(**part, num_items_in_batch=self._targets).loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def _attend_with(kernel: SDPBackend, model: MGKForSequencePairClassification) -> None:
    """Make a softmax model use one stock kernel instead of the choice of the library."""
    for module in model.modules():
        if isinstance(module, MGKAttention):
            module.attend = _stock_attend(module, kernel)  # type: ignore[method-assign]


def _stock_attend(module: MGKAttention, kernel: SDPBackend) -> Callable[..., tuple[Tensor, None]]:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        dropout = module.dropout if module.training else 0.0
        # The context is inside the compiled function; otherwise models with other kernels would reuse the first graph.
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k[:, :, 0], v, dropout_p=dropout)
        return module.out_proj(out.transpose(1, 2).flatten(2)), None

    return attend

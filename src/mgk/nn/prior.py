"""Priors over the components of a mixture: uniform, learned by gradient, or set by the M-step of EM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgk.ops.dispatch import responsibility_sums
from mgk.ops.problem import Mixture, Visibility
from mgk.ops.transforms import is_exported_to_onnx, is_transformed
from mgk.ops.validation import make_problem


class UniformPrior(nn.Module):
    """Equal priors for all components, which need no parameters."""

    def forward(self) -> None:
        return None


class LearnedPrior(nn.Module):
    """``prior = softmax(logits)``, one distribution per key/value head, starting uniform."""

    def __init__(self, num_kv_heads: int, num_components: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(num_kv_heads, num_components))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.logits)

    def forward(self) -> Tensor:
        """Return the log-probabilities ``[Hkv, M]``."""
        return self.logits.log_softmax(dim=-1, dtype=torch.promote_types(self.logits.dtype, torch.float32))

    def extra_repr(self) -> str:
        return f"num_kv_heads={self.logits.shape[0]}, num_components={self.logits.shape[1]}"


class EMPrior(nn.Module):
    """A prior set by the M-step: the mean responsibility of each component over all valid pairs (i, j).

    Backward passes gather responsibilities. :meth:`update` (or :func:`mgk.update_priors` for a whole model), called
    once after each optimiser step, turns them into the new prior. Evaluation changes nothing.

    The sums are gathered as the gradient of a leaf tensor, so that autograd adds them up over micro-batches, counts
    them once under activation checkpointing, and works inside ``torch.compile``.

    Args:
        momentum: share of the old prior that an update keeps; 0 overwrites it, as the paper does.
    """

    FLOOR = 1e-6
    """Lowest prior, because a component with a prior of zero could never recover."""

    log_prior: Tensor

    def __init__(self, num_kv_heads: int, num_components: int, momentum: float = 0.0) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("log_prior", torch.empty(num_kv_heads, num_components))
        self.reset_parameters()
        self._make_probe()

    def reset_parameters(self) -> None:
        self.log_prior.fill_(-math.log(self.log_prior.shape[1]))

    def forward(self) -> Tensor:
        """Return a copy of the log-probabilities ``[Hkv, M]``, since :meth:`update` may run before a backward pass."""
        return self.log_prior.clone()

    def gather(self, out: Tensor, query: Tensor, key: Tensor, mixture: Mixture, visibility: Visibility) -> Tensor:
        """Return ``out``, whose backward pass adds the responsibilities of this attention call to the sum."""
        if not (self.training and torch.is_grad_enabled()):
            return out
        if is_transformed() and not is_exported_to_onnx():
            raise ValueError(
                "prior='em' in training gathers responsibilities as a side effect of backward, got a transform of "
                "torch.func, which allows none: call eval() on the layer, or build it with prior='learned'"
            )
        if not out.requires_grad:
            return out
        return _GatherResponsibilities.apply(out, self._probe, query, key, *mixture, *visibility)

    def gathered(self) -> Tensor:
        """Sum of responsibilities since the last update, ``[Hkv, M]``."""
        return torch.zeros_like(self._probe) if self._probe.grad is None else self._probe.grad

    @torch.no_grad()
    def update(self, sums: Tensor | None = None) -> None:
        """Run the M-step. Heads that have seen no pair keep their prior."""
        sums = self.gathered() if sums is None else sums
        pairs = sums.sum(dim=-1, keepdim=True)
        mean = sums / pairs.masked_fill(pairs == 0, 1.0)
        new = self.momentum * self.log_prior.exp() + (1.0 - self.momentum) * mean
        new = new.clamp(min=self.FLOOR)
        new = new / new.sum(dim=-1, keepdim=True)
        self.log_prior.copy_(torch.where(pairs == 0, self.log_prior, new.log()))
        self._probe.grad = None

    def _make_probe(self) -> None:
        self._probe = torch.zeros(self.log_prior.shape, device=self.log_prior.device, requires_grad=True)

    def train(self, mode: bool = True) -> EMPrior:
        """Switch between training and evaluation."""
        # Loaders of a module built on the meta device set its tensors one by one, but not the probe.
        if self._probe.device != self.log_prior.device:
            self._make_probe()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: Any, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, *arguments)
        # load_state_dict(assign=True) puts tensors in the place of those on the meta device, but not the probe.
        if self._probe.device != self.log_prior.device:
            self._make_probe()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EMPrior:
        before = self.log_prior
        super()._apply(fn, recurse)
        if self.log_prior.dtype in (torch.bfloat16, torch.float16):
            # In half precision a running mean would stop changing, so this buffer does not follow the model's dtype.
            self.log_prior = before.to(self.log_prior.device)
        if self._probe.device != self.log_prior.device:
            self._make_probe()
        return self

    def extra_repr(self) -> str:
        heads, components = self.log_prior.shape
        return f"num_kv_heads={heads}, num_components={components}, momentum={self.momentum}"


class _GatherResponsibilities(torch.autograd.Function):
    """The identity on ``out``, whose backward pass returns the responsibilities as the gradient of ``probe``."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, probe: Tensor, query: Tensor, key: Tensor, *arguments: Any) -> Tensor:
        """Return ``out``. ``arguments`` are the fields of the mixture, then those of its visibility."""
        ctx.save_for_backward(query, key, *(each if isinstance(each, Tensor) else None for each in arguments))
        ctx.settings = [None if isinstance(each, Tensor) else each for each in arguments]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, *tensors = ctx.saved_tensors
        if query.dtype != key.dtype:  # under autocast
            query, key = query.float(), key.float()
        pairs = zip(tensors, ctx.settings, strict=True)
        arguments = [setting if tensor is None else tensor for tensor, setting in pairs]
        count = len(Mixture._fields)
        mixture, visibility = Mixture(*arguments[:count]), Visibility(*arguments[count:])
        # Responsibilities belong to the soft mixture, even if the attention assigns hard.
        problem = make_problem(query, key, None, mixture._replace(assignment="soft"), visibility)
        return (grads[0], responsibility_sums(problem, "auto"), *[None] * (2 + len(arguments)))


def update_priors(model: nn.Module, skip: Tensor | None = None) -> None:
    """Run the M-step for every ``prior="em"`` in ``model``. Call it once after each optimiser step.

    Under ``torch.distributed`` a single all-reduce adds up the sums of all ranks first, so that the ranks agree.

    Args:
        model: any model; one without such priors is left alone.
        skip: a boolean scalar tensor, true if the optimiser skipped the step: the priors then stay as they are and the
            gathered sums are discarded. It is not read on the host.
    """
    priors = [module for module in model.modules() if isinstance(module, EMPrior)]
    if not priors:
        return
    sums = [prior.gathered() for prior in priors]
    if dist.is_available() and dist.is_initialized():
        message = torch.cat([s.flatten() for s in sums])
        dist.all_reduce(message)
        sums = [part.view_as(s) for part, s in zip(message.split([s.numel() for s in sums]), sums, strict=True)]
    for prior, total in zip(priors, sums, strict=True):
        # A sum of zero means that no pair was seen, which keeps the prior.
        prior.update(total if skip is None else torch.where(skip, 0.0, total))

"""Calls over which PyTorch runs a transform: ``torch.func``, forward-mode derivatives, the export to ONNX.

Under these most backends do not work: a fused kernel or a custom operation has one derivative at most, no forward mode
and no node in ONNX, and no number may be read on the host. There the public functions take a formula that composes. Who
dispatches asks :func:`is_transformed` once, before anything else, and then leaves the choice to
:func:`composable_backend`: a new backend needs to know nothing of transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FORWARD = torch._C._functorch.TransformType.Jvp
_REVERSE = torch._C._functorch.TransformType.Grad


def is_transformed() -> bool:
    """Whether a transform runs over the call, for which a backend must compose and values cannot be read."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return is_exported_to_onnx()
    return forward_ad._current_level >= 0


def is_exported_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` traces the call."""
    # To ask for ONNX first would import it.
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def is_mapped(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds one value for each of the calls that ``torch.func.vmap`` maps."""
    return torch._C._functorch.is_batchedtensor(tensor)


def composable_backend(backend: str) -> str:
    """The backend of a transformed call, which is ``backend`` unless that is ``"auto"``; an error if it cannot do it.

    ``"chunked"`` has a first derivative and can be mapped, in linear memory; ``"reference"`` can do everything.
    """
    able: tuple[str, ...]
    if is_exported_to_onnx():
        asked, able = "an export to ONNX", ("reference", "sdpa")
    elif needs_plain_torch():
        asked, able = "forward-mode or second derivatives, nor torch.func inside torch.compile", ("reference",)
    elif is_differentiated():
        asked, able = "a derivative of torch.func", ("chunked", "reference", "sdpa")
    else:
        # vmap alone: an operation without a rule is called once for each.
        asked, able = "a map of torch.func", ("chunked", "reference", "sdpa", "triton")
    if backend == "auto":
        return able[0]
    if backend not in able:
        raise ValueError(f"backend={backend!r} cannot do {asked}: use 'auto' or 'reference'")
    return backend


def is_differentiated() -> bool:
    """Whether a transformed call is more than mapped."""
    return needs_plain_torch() or _REVERSE in _kinds()


def needs_plain_torch() -> bool:
    """Whether a transformed call needs operations of PyTorch alone, each of which it can transform itself.

    A formula of our own has a backward and can be mapped; forward mode, a derivative of the backward, a graph of ONNX
    and ``torch.func`` inside ``torch.compile`` are beyond it.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return True
    kinds = _kinds()
    return _FORWARD in kinds or kinds.count(_REVERSE) > 1


def _kinds() -> list[Any]:
    """The transforms of torch.func that run over the call, from the outermost on."""
    return [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack()]

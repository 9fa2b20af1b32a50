"""Calls under a transform of PyTorch: ``torch.func``, forward-mode derivatives, the export to ONNX.

Most backends do not work there: a fused kernel or a custom operation has at most a first derivative, no forward mode
and no ONNX node, and no value may be read on the host. The dispatcher therefore asks :func:`is_transformed` first and
leaves the choice to :func:`composable_backend`, which picks a backend that composes with the transform. A new backend
need not know about transforms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FORWARD = torch._C._functorch.TransformType.Jvp
_REVERSE = torch._C._functorch.TransformType.Grad


def is_transformed() -> bool:
    """Whether the call is under a transform, so that the backend must compose with it and values cannot be read."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_compiling():
        return is_exported_to_onnx()
    return forward_ad._current_level >= 0


def is_exported_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` traces the call."""
    # Asking torch.onnx first would import it.
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def is_mapped(tensor: Tensor) -> bool:
    """Whether ``tensor`` is batched by ``torch.func.vmap``."""
    return torch._C._functorch.is_batchedtensor(tensor)


def composable_backend(backend: str) -> str:
    """Return the backend for a transformed call: ``backend`` itself, or a choice if that is ``"auto"``.

    Raises ``ValueError`` for a backend that does not compose with the transform. ``"chunked"`` has a first derivative
    and can be mapped, in linear memory; ``"reference"`` composes with every transform.
    """
    able: tuple[str, ...]
    if is_exported_to_onnx():
        asked, able = "an export to ONNX", ("reference", "sdpa")
    elif needs_plain_torch():
        asked, able = "forward-mode or second derivatives, nor torch.func inside torch.compile", ("reference",)
    elif is_differentiated():
        asked, able = "a derivative of torch.func", ("chunked", "reference", "sdpa")
    else:
        # Under vmap alone, an operation without a rule of its own is called once for each slice.
        asked, able = "a map of torch.func", ("chunked", "reference", "sdpa", "triton")
    if backend == "auto":
        return able[0]
    if backend not in able:
        raise ValueError(f"backend={backend!r} cannot do {asked}: use 'auto' or 'reference'")
    return backend


def is_differentiated() -> bool:
    """Whether a transformed call is differentiated or exported, and not only mapped."""
    return needs_plain_torch() or _REVERSE in _kinds()


def needs_plain_torch() -> bool:
    """Whether a transformed call must consist of PyTorch's own operations, which support every transform.

    Our own autograd functions have a backward pass and can be mapped, but support neither forward mode nor a derivative
    of the backward pass, ONNX graphs or ``torch.func`` inside ``torch.compile``.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return True
    kinds = _kinds()
    return _FORWARD in kinds or kinds.count(_REVERSE) > 1


def _kinds() -> list[Any]:
    """Kinds of the torch.func transforms around the call, the outermost first."""
    return [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack()]

"""A workspace that persists between tiles and calls."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

# Largest array, in elements, that is kept between two calls: 8 MiB in fp32.
LARGEST_KEPT = 2**21


class Workspace(threading.local):
    """Reusable arrays by name. Each thread has its own."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, torch.dtype], Tensor] = {}
        self._sizes: dict[tuple[str, torch.dtype], int] = {}
        # The views that were last requested, since making a view costs as much as a pass over a small array.
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return an uninitialised array with the dtype of ``like``, valid until this name is requested again."""
        at = (name, like.dtype)
        view = self._views.get(at)
        if view is not None and view.shape == shape:
            return view
        if torch.is_inference_mode_enabled():
            # An array outlives the call, and one that is made in inference mode cannot be written to outside of it.
            with torch.inference_mode(False):
                return self.array(name, like, *shape)
        size = math.prod(shape)
        if self._sizes.get(at, -1) < size:
            self._arrays[at], self._sizes[at] = like.new_empty(size), size
        self._views[at] = view = self._arrays[at][:size].view(shape)
        return view

    def drop_large_arrays(self) -> None:
        """Release the arrays of long sequences, for which new memory is cheap compared with the work on it."""
        # The sizes are stored because asking the tensors takes a short call longer than a pass over their elements.
        large = [at for at, size in self._sizes.items() if size > LARGEST_KEPT]
        for at in large:
            del self._arrays[at], self._sizes[at], self._views[at]


workspace = Workspace()

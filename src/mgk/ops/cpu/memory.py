"""Memory that stays between tiles and calls."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

# Numbers of an array that is kept between two calls: 8 MiB in fp32.
LARGEST_KEPT = 2**21


class Workspace(threading.local):
    """Arrays by name; each thread has its own."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, torch.dtype], Tensor] = {}
        self._sizes: dict[tuple[str, torch.dtype], int] = {}
        # As they were last asked for: to make a view costs as much as a pass over a small array.
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised array with the dtype of ``like``, valid until the next one of this name is asked for."""
        at = (name, like.dtype)
        view = self._views.get(at)
        if view is not None and view.shape == shape:
            return view
        size = math.prod(shape)
        if self._sizes.get(at, -1) < size:
            self._arrays[at], self._sizes[at] = like.new_empty(size), size
        self._views[at] = view = self._arrays[at][:size].view(shape)
        return view

    def drop_large_arrays(self) -> None:
        """Long sequences give their memory back: beside their work, new memory is cheap."""
        # To ask tensors how long they are would take a short call longer than a pass over its numbers.
        large = [at for at, size in self._sizes.items() if size > LARGEST_KEPT]
        for at in large:
            del self._arrays[at], self._sizes[at], self._views[at]


workspace = Workspace()

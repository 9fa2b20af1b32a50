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
        # As they were last asked for: to make a view costs as much as a pass over a small array.
        self._views: dict[tuple[str, torch.dtype], Tensor] = {}

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised array with the dtype of ``like``, valid until the next one of this name is asked for."""
        at = (name, like.dtype)
        view = self._views.get(at)
        if view is not None and view.shape == shape:
            return view
        size = math.prod(shape)
        found = self._arrays.get(at)
        if found is None or len(found) < size:
            found = like.new_empty(size)
            self._arrays[at] = found
        self._views[at] = view = found[:size].view(shape)
        return view

    def drop_large_arrays(self) -> None:
        """Long sequences give their memory back: beside their work, new memory is cheap."""
        large = [at for at, array in self._arrays.items() if len(array) > LARGEST_KEPT]
        for at in large:
            del self._arrays[at], self._views[at]


workspace = Workspace()

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

    def array(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised array with the dtype of ``like``, valid until the next one of this name is asked for."""
        size = math.prod(shape)
        found = self._arrays.get((name, like.dtype))
        if found is None or len(found) < size:
            found = like.new_empty(size)
            self._arrays[name, like.dtype] = found
        return found[:size].view(shape)

    def drop_large_arrays(self) -> None:
        """Long sequences give their memory back: beside their work, new memory is cheap."""
        self._arrays = {name: array for name, array in self._arrays.items() if len(array) <= LARGEST_KEPT}


workspace = Workspace()

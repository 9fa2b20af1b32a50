"""The copy engine's two commands in Gluon, under whichever name this version of Triton has them: 3.7 gave them shorter
ones, and 3.9 took the old ones away."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""``descriptor, coordinates, barrier, shared memory``: a block of a tensor comes, which the barrier tells."""
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""``descriptor, coordinates, shared memory``: a block of a tensor leaves."""

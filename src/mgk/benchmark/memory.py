"""The memory that a call uses, and the memory that is available."""

from __future__ import annotations

import torch

from mgk.benchmark.timing import Candidate

CPU_LIMIT = 2**31
"""Most bytes that a call may use on a CPU, whose memory others use, too."""


def peak_bytes(candidate: Candidate, device: torch.device) -> int | None:
    """Peak of allocated bytes during a call, beyond those before it; ``None`` on a CPU, where they are not counted."""
    if device.type != "cuda":
        with candidate.context():
            candidate.call()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with candidate.context():
        candidate.call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def available_bytes(device: torch.device) -> int:
    """Bytes that a call may use."""
    if device.type != "cuda":
        return CPU_LIMIT
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # A part is left free, because of fragmentation.
    return int(0.85 * (free + cached))

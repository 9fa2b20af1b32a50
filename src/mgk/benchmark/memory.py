"""How much memory a call takes, and how much there is."""

from __future__ import annotations

import torch

from mgk.benchmark.timing import Candidate

CPU_LIMIT = 2**31
"""What a call may take on a CPU, whose memory others use, too."""


def peak_bytes(candidate: Candidate, device: torch.device) -> int | None:
    """The most that is allocated at any time of a call, beyond what was before it; ``None`` on a CPU: nobody counts."""
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
    """What a call may take."""
    if device.type != "cuda":
        return CPU_LIMIT
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # Not all of it: blocks of many sizes leave gaps.
    return int(0.85 * (free + cached))

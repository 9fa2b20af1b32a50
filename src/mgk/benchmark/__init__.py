"""Benchmarks of speed and memory, always next to a peer in the same run, and without numbers for wrong results."""

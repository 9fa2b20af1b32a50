"""Reproduction of the paper's tables and figures from the files in `results/`."""

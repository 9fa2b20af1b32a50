"""Sweeps of many runs, one after the other in this process or several at once on one device."""

from mgk.commands.sweep.in_turn import Sweep, mean_and_error, run_sweep, table_of

__all__ = ["Sweep", "mean_and_error", "run_sweep", "table_of"]

"""Processes of a command that works on several things at once. Nothing here imports torch: starting must not wait."""

"""Errors of a training run other than plain ``ValueError``."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, missing, or belongs to another run."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written. Earlier ones are untouched."""


class RunLockedError(RuntimeError):
    """Another process writes to the same run folder."""


class NonFiniteError(RuntimeError):
    """Too many steps in a row had no finite loss or gradient."""


class Interrupted(Exception):
    """A signal has interrupted the run."""

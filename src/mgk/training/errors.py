"""What a training run can fail with that is not a plain ``ValueError``."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, missing, or belongs to another run."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written. Those before it are untouched."""


class RunLockedError(RuntimeError):
    """Another process writes to the same run folder."""


class NonFiniteError(RuntimeError):
    """Too many steps in a row had no finite loss or gradient."""


class Interrupted(Exception):
    """A signal came."""

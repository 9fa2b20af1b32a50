"""The one error of `mgk.data`."""


class DataError(ValueError):
    """Data that is not what it should be. The message names the file, and the record where there is one."""

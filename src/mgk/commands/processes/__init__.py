"""Child processes of a command that runs several things at once. To start fast, nothing here imports torch."""

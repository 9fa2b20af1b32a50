"""Tables and figures of the paper, made again from what is in `results/`."""

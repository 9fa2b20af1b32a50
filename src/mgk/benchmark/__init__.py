"""Speed and memory, always next to the peer in the same run, and no number for a result that is wrong."""

"""Kernels for Hopper alone, in Gluon: they need its warp specialisation, TMA copies and asynchronous products."""

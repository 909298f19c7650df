"""Kernels side by side with named peers in one run: timed in turns, checked, judged by bars, reported.

The harness knows cases and sides; what a kernel computes is known to the package of its cases alone.
"""

"""Public Triton kernels of the same jobs, compiled like ours where their package is installed."""

from bench.calls import Call

COMPETITORS: dict[str, Call] = {}
"""Calls by name; empty where nothing is installed."""

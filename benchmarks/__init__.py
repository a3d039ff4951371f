"""Benchmarks: ``python -m benchmarks.NAME --json OUT [--quick]``."""

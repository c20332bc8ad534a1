"""Benchmarks: each a command, `python -m benchmarks.NAME`, with `--json`. What they showed is in docs/performance.md."""

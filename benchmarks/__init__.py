"""Scripts that measure, one a file; `results/` holds what they recorded.

Each runs by its path or as a module: `python benchmarks/decode.py` or `python -m benchmarks.decode`.
"""

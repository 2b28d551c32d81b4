"""What a step costs: run from a clone, `python -m benchmarks.bench`."""

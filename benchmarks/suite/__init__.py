"""The benchmark: workloads, the runner, its report and its plots. ``python -m benchmarks.suite`` from the root."""

"""The benchmark: scale models, workloads, the runner, its report and its plots."""

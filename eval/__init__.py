"""Evaluation scripts: accuracy, time per output token and kernel baselines."""

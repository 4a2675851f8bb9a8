"""Accuracy and time per output token of a served model with the heuristic off and on, and their verdicts."""

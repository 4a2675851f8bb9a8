"""Code shared by the end-to-end evaluation scripts: processes, run store, statistics, reports."""

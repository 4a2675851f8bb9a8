"""Options, tables, exit statuses, random tensors and the description of the machine, for all folders."""

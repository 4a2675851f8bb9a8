"""Options, tables, exit statuses, files of results and the description of the machine, for all folders."""

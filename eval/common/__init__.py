"""Options, tables, exit statuses and the description of the machine, which all folders use."""

"""Every launch compared beside other work, under delays and on arguments that are rewritten."""

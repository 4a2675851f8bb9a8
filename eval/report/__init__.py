"""What the pages say of results, and what a built library and wheel hold."""

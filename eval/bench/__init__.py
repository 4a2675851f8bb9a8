"""Times of the ops and of other projects' kernels."""

"""Which GPU each rank of a mesh gets."""

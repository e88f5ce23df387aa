"""`edgespec bench`: every way of splitting the work, with the same code, link and models."""

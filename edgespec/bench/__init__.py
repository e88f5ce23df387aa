"""Parts of `edgespec bench`, which compares ways of decoding with the same code and models."""

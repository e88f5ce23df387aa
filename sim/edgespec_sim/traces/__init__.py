"""Network traces: what they are, how they are read, made and judged."""

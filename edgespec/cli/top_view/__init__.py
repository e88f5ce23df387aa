"""The parts of ``edgespec top``: what is read from whom, and how it is shown."""

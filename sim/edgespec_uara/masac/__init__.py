"""Multi-agent soft actor-critic in torch: training only; what it learns runs in ``policy``."""

"""The sampling law and its noise: on arrays for drafters, on tensors for targets."""

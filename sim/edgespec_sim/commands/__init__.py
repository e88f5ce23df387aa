"""``edgespec-sim``: the simulator's commands."""

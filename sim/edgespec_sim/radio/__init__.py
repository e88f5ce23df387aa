"""The air: gains between places, who moves where, and what the radio takes from a battery."""

"""Worlds in which everything fails that can, and the checks that must hold in them."""

"""A whole scenario in virtual time: users, networks, verifiers, and what is measured of them."""

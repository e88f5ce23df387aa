"""The sources of a simulated world's tokens: recorded, drawn, or from the toy model."""

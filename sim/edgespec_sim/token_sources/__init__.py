"""Where the tokens of a simulated world come from: recorded, drawn, or the toy model's."""

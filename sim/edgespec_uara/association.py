"""``python -m edgespec_uara.association``: distil the joint solution into a policy for agents.

The association of greedy search with optimal shares needs to know every device at once. What is
written here (``policies/association.json``) is a small network that comes near it from what a
single agent knows; ``network.py`` runs it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from edgespec_uara.cost import CorrectedCost
from edgespec_uara.network import LearnedAssociation

FILE = "association.json"
BYTES_MAX = 50_000


def shipped_association() -> LearnedAssociation:
    text = (resources.files("edgespec_uara") / "policies" / FILE).read_text(encoding="utf-8")
    return LearnedAssociation.from_json(text)


def main(
    seed: int = 0,
    worlds: Annotated[int, typer.Option(min=1, help="To learn from")] = 120,
    out: Path = Path(__file__).parent / "policies" / FILE,
) -> None:
    """Distil, and write the weights as JSON."""
    from edgespec_uara.masac.learner import distil

    network, agreement = distil(worlds, seed, CorrectedCost())
    text = network.to_json()
    if len(text) > BYTES_MAX:
        raise ValueError(f"{out}: {len(text)} bytes, at most {BYTES_MAX}")
    out.write_text(text, encoding="utf-8")
    typer.echo(f"names the teacher's server for {agreement:.1%} of devices; wrote {out}")


if __name__ == "__main__":
    typer.run(main)

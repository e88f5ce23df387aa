"""Origins of committed tokens: which draft source had a token in the tree before the target chose
it.

A commit states how many of its first tokens came from the device. The device's own tree shows
which of its sources had them. Behind them stand tokens that the verifier drafted itself, and the
last token of a pass is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from edgespec.core.protocol.messages import Commit
from edgespec.core.protocol.tree import NO_CELL, UNRANKED, Node, SpeculationTree


class TokenOrigin(Enum):
    """Origin of a committed token."""

    PREDICTION = "prediction"
    """The prediction of the client offered the token, whether or not other sources on the device
    did so too."""
    DEVICE_MODEL = "device model"
    """The device's draft model offered the token, whether or not lookup did so too."""
    DEVICE_LOOKUP = "device lookup"
    """Only lookup on the device offered the token."""
    SERVER = "server"
    """The verifier drafted the token by its own model, speculator or lookup."""
    TARGET = "target"
    """The target chose the token, and no draft of it was accepted."""
    LOCAL = "local"
    """A model of the device wrote the token, because no verifier could be reached."""
    UNKNOWN = "unknown"
    """The token was sent again after the link broke. Such commits do not state an origin."""


def find_origins(
    tree: SpeculationTree, commit: Commit, *, has_prediction: bool
) -> tuple[TokenOrigin, ...]:
    """Return the origins of the tokens in ``commit`` that the device does not hold yet.

    Args:
        tree: The device's tree before it reads the commit.
        commit: The commit. It continues the tree's prefix.
        has_prediction: Whether the client has sent a prediction. Else a whole text is one that
            lookup has found.

    Returns:
        One origin for each token behind the prefix; none if the commit does not continue it.
    """
    held = tree.prefix.length - commit.position
    if held < 0:
        return ()
    origins: list[TokenOrigin] = []
    children: Sequence[Node] = tree.roots
    last = len(commit.tokens) - 1
    for index in range(held, len(commit.tokens)):
        token = commit.tokens[index]
        node = next((one for one in children if one.token == token), None)
        children = () if node is None else node.children
        if index < commit.accepted or index in commit.replaced:
            origins.append(_device_origin(node, has_prediction))
        elif not commit.verify_us:
            origins.append(TokenOrigin.UNKNOWN)
        else:
            origins.append(TokenOrigin.SERVER if index < last else TokenOrigin.TARGET)
    return tuple(origins)


def _device_origin(node: Node | None, has_prediction: bool) -> TokenOrigin:
    text = TokenOrigin.PREDICTION if has_prediction else TokenOrigin.DEVICE_LOOKUP
    if node is None:  # The verifier went on in text that the device had sent for another place.
        return text
    if node.prediction_cell != NO_CELL:
        return text
    return TokenOrigin.DEVICE_LOOKUP if node.rank == UNRANKED else TokenOrigin.DEVICE_MODEL

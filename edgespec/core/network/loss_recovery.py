"""How long TCP takes to send a lost packet again, as Linux does it.

Theory of operation. RACK (RFC 8985, which Linux follows by default) calls a packet lost once one
that was sent after it has been acknowledged, and a quarter of a round trip has passed in which it
might only have been overtaken. So a sender that goes on sending finds out a round trip and the gap
to its next packet later; three duplicate acknowledgements (RFC 5681) would take three gaps. One
that falls silent has the retransmission timeout: a round trip and at least 200 ms in Linux (RFC
6298 asks for more), doubled each time. A tail-loss probe comes no earlier for a lone packet, as it
waits for a delayed acknowledgement as well.

What is not here: congestion windows, as messages are far below one; and the gap to the packet that
comes *next* is not known when a message leaves, so the gap before it stands for it.
"""

from __future__ import annotations

from typing import Final

LEAST_TIMEOUT_S: Final = 0.2
"""Linux's floor of what a retransmission timeout adds to the round trip (TCP_RTO_MIN)."""
_REORDERING: Final = 0.25
"""Share of a round trip that RACK waits for packets that overtook one another."""
MOST_LOSSES: Final = 6


def late_s(draw: float, probability: float, loss: float, rtt_s: float, gap_s: float) -> float:
    """How much later a message arrives for its losses. ``draw`` in (0, 1) decides on them;
    ``probability``: that any of its packets is lost at first, ``loss``: a packet sent again;
    ``gap_s``: until the sender's next packet."""
    total_s = 0.0
    timeout_s = rtt_s + LEAST_TIMEOUT_S
    for _ in range(MOST_LOSSES):
        if draw >= probability:
            break
        found_s = rtt_s + max(gap_s, _REORDERING * rtt_s)
        if found_s < timeout_s:
            total_s += found_s
        else:
            total_s += timeout_s
            timeout_s *= 2.0
        probability *= loss
    return total_s

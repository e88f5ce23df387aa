"""The capacity of a radio link from its signal quality, by a stated map.

A channel quality indicator (CQI) stands for a spectral efficiency in 3GPP TS 38.214, table
5.2.2.1-2 (64QAM, block error rate 0.1). The capacity is that efficiency times the bandwidth: one
layer, one user, no overhead of control channels. CQI 0 is out of range, so nothing passes.

No standard maps an SINR to a CQI. This is ns-3's map (``LteAmc``, model ``PiroEW2010``): the
efficiency that M-QAM reaches at a bit error rate of 5e-5 is ``log2(1 + SINR / G)`` with
``G = -ln(5 BER) / 1.5``, which is 7.4 dB, and the CQI is the highest one that needs no more.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable
from typing import Final

EFFICIENCIES: Final = (
    *(0.0, 0.1523, 0.2344, 0.3770, 0.6016, 0.8770, 1.1758, 1.4766),
    *(1.9141, 2.4063, 2.7305, 3.3223, 3.9023, 4.5234, 5.1152, 5.5547),
)
"""Bits per second and hertz of CQI 0 to 15."""
_BIT_ERROR_RATE: Final = 5e-5
_GAP: Final = -math.log(5.0 * _BIT_ERROR_RATE) / 1.5
_MAX_DB: Final = 200.0

_UNIT: Final = re.compile(r"(?P<kind>cqi|dB)@(?P<width>[0-9]+(?:\.[0-9]+)?)(?P<prefix>[kMG])Hz")
_PREFIXES: Final = {"k": 1e3, "M": 1e6, "G": 1e9}


def cqi_efficiency(cqi: float) -> float:
    """Return the bits per second and hertz of a CQI. The mean of several is rounded down.

    Raises ``ValueError`` if it is not in [0, 15]."""
    if not 0.0 <= cqi < len(EFFICIENCIES):
        raise ValueError(f"a CQI of 0 to {len(EFFICIENCIES) - 1}")
    return EFFICIENCIES[int(cqi)]


def sinr_efficiency(sinr_db: float) -> float:
    """Return the bits per second and hertz of the CQI that an SINR in dB allows. 0 if it allows
    none. Raises ``ValueError`` if it is not within 200 dB."""
    if not -_MAX_DB <= sinr_db <= _MAX_DB:
        raise ValueError(f"an SINR of -{_MAX_DB:g} to {_MAX_DB:g} dB")
    reached = math.log2(1.0 + 10.0 ** (sinr_db / 10.0) / _GAP)
    return EFFICIENCIES[bisect.bisect_right(EFFICIENCIES, reached) - 1]


def parse_quality_unit(unit: str) -> Callable[[float], float] | None:
    """Return the function from a CQI (``cqi@20MHz``) or an SINR (``dB@20MHz``) to bits per second.

    Returns None if this is no such unit. The function raises ``ValueError`` that names what is
    expected."""
    found = _UNIT.fullmatch(unit)
    if found is None:
        return None
    width_hz = float(found["width"]) * _PREFIXES[found["prefix"]]
    efficiency = cqi_efficiency if found["kind"] == "cqi" else sinr_efficiency
    return lambda value: efficiency(value) * width_hz

"""A learned association: a small network that scores (device, verifier) pairs.

For each device, in order, the score of every verifier is computed from what an agent knows before
it opens a session; the best score wins, its verifier counts one more, and the next device follows.
A full verifier is passed over unless all are full. The weights are data:

    {"version": 1, "features": [names], "layers": [{"weights": rows, "bias": row}, ...]}

Layers are dense, ReLU between them; a row of weights is one output. The last has one output.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec_sim.association import DeviceView, Links, LinkView, VerifierView

VERSION = 1
TEXT_MAX = 1 << 20
LAYERS_MAX, WIDTH_MAX = 8, 512
FEATURES = (
    "rtt",
    "uplink",
    "downlink",
    "signal",
    "pass",
    "load",
    "fullness",
    "loaded pass",
    "step",
    "acceptance",
    "battery",
)
_FAST_BITS_PER_S = 1e10
"""What counts as no limit."""
_WIRED_SNR_DB = 40.0


@dataclass(frozen=True, slots=True)
class Layer:
    """``weights[output][input]``, ``bias[output]``."""

    weights: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]


def pair_features(
    device: DeviceView, verifier: VerifierView, link: LinkView, sessions: int
) -> tuple[float, ...]:
    """In the order of ``FEATURES``, each of order 1. ``sessions`` are those there already."""
    loaded_s = verifier.pass_s + sessions * verifier.session_s
    snr_db = _WIRED_SNR_DB if link.snr_db is None else link.snr_db
    return (
        _log(link.rtt_s, 0.02),
        _log(min(link.up_bits_per_s, _FAST_BITS_PER_S), 1e6),
        _log(min(link.down_bits_per_s, _FAST_BITS_PER_S), 1e7),
        min(max(snr_db, -20.0), 60.0) / 20.0,
        _log(verifier.pass_s, 0.02),
        math.log1p(sessions) / 2.0,
        min(sessions / verifier.max_sessions, 1.0) if verifier.max_sessions else 1.0,
        _log(loaded_s, 0.05),
        _log(device.step_s, 0.01),
        device.acceptance,
        device.battery_share,
    )


def _log(value: float, middle: float) -> float:
    return math.log(max(value, 1e-3 * middle) / middle) / 2.0


class LearnedAssociation:
    """An ``AssociationPolicy``; the best score wins."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = tuple(layers)
        _check(self._layers)

    @property
    def name(self) -> str:
        return "learned"

    @classmethod
    def from_json(cls, text: str) -> LearnedAssociation:
        """Raises ``ValueError`` that says what is wrong."""
        if len(text) > TEXT_MAX:
            raise ValueError(f"association weights of {len(text)} characters, at most {TEXT_MAX}")
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            said = data.get("version") if isinstance(data, dict) else None
            raise ValueError(f"association weights of version {said!r}; this reads {VERSION}")
        if data.get("features") != list(FEATURES):
            raise ValueError(f"association weights for features {data.get('features')!r}")
        try:
            layers = [
                Layer(
                    tuple(tuple(float(number) for number in row) for row in layer["weights"]),
                    tuple(float(number) for number in layer["bias"]),
                )
                for layer in data["layers"]
            ]
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"association weights: a layer is not as it should be: {error!r}"
            ) from None
        return cls(layers)

    def to_json(self) -> str:
        layers = [{"weights": layer.weights, "bias": layer.bias} for layer in self._layers]
        return json.dumps({"version": VERSION, "features": FEATURES, "layers": layers}) + "\n"

    def score(self, features: Sequence[float]) -> float:
        """Of one pair; only comparisons between verifiers of one device mean anything."""
        row = list(features)
        for index, layer in enumerate(self._layers):
            if index:
                row = [max(number, 0.0) for number in row]
            row = [
                bias + sum(weight * number for weight, number in zip(weights, row, strict=True))
                for weights, bias in zip(layer.weights, layer.bias, strict=True)
            ]
        return row[0]

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        counts = [verifier.sessions for verifier in verifiers]
        chosen = []
        for device, row in zip(devices, links, strict=True):
            free = [
                index
                for index, verifier in enumerate(verifiers)
                if counts[index] < verifier.max_sessions
            ]
            scores = {
                index: self.score(
                    pair_features(device, verifiers[index], row[index], counts[index])
                )
                for index in free or range(len(verifiers))
            }
            best = max(scores, key=scores.__getitem__)
            counts[best] += 1
            chosen.append(best)
        return tuple(chosen)


def _check(layers: Sequence[Layer]) -> None:
    if not 1 <= len(layers) <= LAYERS_MAX:
        raise ValueError(f"association weights of {len(layers)} layers, 1 to {LAYERS_MAX}")
    inputs = len(FEATURES)
    for number, layer in enumerate(layers):
        outputs = len(layer.bias)
        if not 1 <= outputs <= WIDTH_MAX or len(layer.weights) != outputs:
            shape = f"{len(layer.weights)} rows and {outputs} biases"
            raise ValueError(f"association weights: layer {number} has {shape}")
        for row in layer.weights:
            if len(row) != inputs:
                raise ValueError(
                    f"association weights: layer {number} takes {len(row)} inputs, not {inputs}"
                )
        if not all(map(math.isfinite, (*layer.bias, *(w for row in layer.weights for w in row)))):
            raise ValueError(f"association weights: layer {number} holds a number that is not one")
        inputs = outputs
    if inputs != 1:
        raise ValueError(f"association weights: {inputs} scores a pair, wanted 1")

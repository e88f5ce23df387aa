"""Keys of earlier versions that are gone, and what a user does instead.

A key that only tuned something is read and has no effect, so that a file of an earlier version, in
which ``--help-all`` printed every key, still loads. A key that changed what a device or a verifier
does is refused, because leaving it out silently would surprise its user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WITHOUT_EFFECT: Final[Mapping[str, Mapping[str, str]]] = {
    "AgentConfig": {
        "failover.ask_s": "since 0.2.0 a first generation waits for no probes",
        "failover.settle_s": "since 0.2.0 a first generation waits for no probes",
    },
}
"""Dotted keys that are read and change nothing, each with the reason, by kind of configuration."""

REFUSED: Final[Mapping[str, Mapping[str, str]]] = {
    "AgentConfig": {
        "offline": "use fallback: draft, which answers while no verifier can be reached",
        "offline_grace_s": "use fallback: draft, which answers while no verifier can be reached",
    },
    "DraftSection": {
        "ladder": "drafting stops by itself where it does not pay; remove the key",
    },
    "PolicySection": {
        "leaves": "a draft step has one leaf; remove the key",
        "prefer": "drafting stops by itself where it does not pay; remove the key",
    },
    "EndpointSection": {
        "log_prompts": "prompts are in no log; send the messages to /tokenize to see them",
    },
    "VerifierConfig": {
        "cuda_graphs": "small passes are always repeated from CUDA graphs; remove the key",
        "front_processes": "one process takes all streams; remove the key",
        "pipeline": "use engine: vllm for a model on several GPUs",
        "tensor_parallel": "use engine: vllm for a model on several GPUs",
    },
}
"""Keys that are refused, each with what to do instead, by the section that had them."""

"""Which ``Open`` a verifier takes. Oracle: one request for every bound, just inside and just past
it; a refusal names the value and the limit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import EXACT_RULE, FaultCode, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier.admission import refuse_open

MODEL = ModelInfo("big", "words-1", 100, 64)
LIMITS = Limits(context_length=8)
REQUEST = Open("s", "big", "words-1", (1, 2, 3), sampling=SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, model=""),
        replace(REQUEST, vocabulary=""),
        replace(REQUEST, prompt=(99,) * 7),
        replace(REQUEST, committed=(0, 99, 1, 2)),
        replace(REQUEST, prompt=(1,) * 5, committed=(1, 2, 3)),
    ],
)
def test_taken(request_: Open) -> None:
    assert refuse_open(request_, MODEL, LIMITS, frozenset({EXACT_RULE})) is None


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (replace(REQUEST, version=2), FaultCode.INVALID, "version 2 is not 1"),
        (replace(REQUEST, rule="lossy"), FaultCode.INVALID, "'lossy'; known: exact"),
        (replace(REQUEST, model="small"), FaultCode.UNKNOWN_MODEL, "'small'.*'big'"),
        (replace(REQUEST, vocabulary="w2"), FaultCode.VOCABULARY_MISMATCH, "w2.*words-1"),
        (replace(REQUEST, session_id=""), FaultCode.INVALID, "session id is empty"),
        (replace(REQUEST, prompt=()), FaultCode.INVALID, "prompt is empty"),
        (replace(REQUEST, prompt=(1,) * 8), FaultCode.CONTEXT_TOO_LONG, "8 tokens .* of 8"),
        (replace(REQUEST, prompt=(1,) * 6, committed=(1,) * 3), FaultCode.CONTEXT_TOO_LONG, "9"),
        (replace(REQUEST, committed=(1,) * 5), FaultCode.INVALID, "5 .* max_tokens 4"),
        (replace(REQUEST, prompt=(100,)), FaultCode.INVALID, "token 100 .* vocabulary of 100"),
        (replace(REQUEST, committed=(-1,)), FaultCode.INVALID, "token -1"),
        (
            replace(REQUEST, sampling=SamplingParams(max_tokens=4, stop_token_ids=(99, 100))),
            FaultCode.INVALID,
            "token 100 of stop_token_ids .* vocabulary of 100",
        ),
        (
            replace(REQUEST, sampling=SamplingParams(max_tokens=4, logit_bias={100: 1.0})),
            FaultCode.INVALID,
            "token 100 of logit_bias .* vocabulary of 100",
        ),
    ],
)
def test_refused(request_: Open, code: FaultCode, words: str) -> None:
    fault = refuse_open(request_, MODEL, LIMITS, frozenset({EXACT_RULE}))
    assert fault is not None
    assert fault.code is code
    assert re.search(words, fault.message), fault.message

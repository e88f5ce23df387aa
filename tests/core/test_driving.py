"""The program in ``docs/driving-the-core.md`` runs as it is printed, and writes what it should.

Oracle: the scalar specification of the toy target (``toy_text``).
"""

from __future__ import annotations

import re

import pytest

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy import ToyTokenizer
from tests.kit.live_verifier import toy_text
from tests.sources import ROOT

PAGE = ROOT / "docs/driving-the-core.md"


def test_the_printed_loop_writes_what_the_target_alone_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(program, str(PAGE), "exec"), {})
    written, counted = capsys.readouterr().out.splitlines()
    tokenizer = ToyTokenizer()
    expected = toy_text(tokenizer.encode("Once upon a"), SamplingParams(max_tokens=40))
    assert written == tokenizer.decode(expected)
    accepted = int(counted.split()[0])
    assert accepted > len(expected) / 2

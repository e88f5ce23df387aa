"""Pictures on vLLM, without vLLM: rows and positions on the stand-in for its core.

Oracle: the toy's law for the pictures, by the scalar specification of sampling.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.core import ports
from edgespec.models.toy import TOY_MODEL
from edgespec.verifier.vllm.target import ExpandedPrompt
from edgespec.verifier.vllm.worker import _Text, arguments_of
from tests.verifier.fake_vllm import FakeVllm, fake_target
from tests.verifier.test_vllm import GREEDY, GUESSES, LEAST, LENGTH, PROMPT, SAMPLED, Session

# The third and the sixth token of the prompt are pictures of 10 and of 5 rows.
EXPANDED = ExpandedPrompt(
    tokens=(0,) * (len(PROMPT) + 13),
    features=(7, 8),
    positions=(2, 5),
    ends=(12, 19),
    length=len(PROMPT),
)


def test_rows_of_pictures_are_counted_where_they_stand() -> None:
    rows = [EXPANDED.count_rows(length) for length in range(8)]
    assert rows == [0, 1, 2, 12, 13, 14, 19, 20]
    assert EXPANDED.count_rows(len(PROMPT)) == len(PROMPT) + 13
    assert EXPANDED.count_rows(len(PROMPT) + 4) == len(PROMPT) + 17
    assert EXPANDED.extra_rows == 13


@pytest.mark.parametrize("whims", [0.0, 0.3])
@pytest.mark.parametrize("kind", GUESSES)
def test_a_text_with_pictures_is_the_same_whatever_is_drafted(kind: str, whims: float) -> None:
    """The stand-in counts rows as vLLM does, and the session counts a picture as one token."""
    engine = FakeVllm(whims, seed=len(kind))
    target = fake_target(engine)
    law = TOY_MODEL.perturbed(0.5, 15)
    session = Session(target, "a", SAMPLED, GUESSES[kind], law)
    target.use_pictures("a", ports.ReadPictures(13, EXPANDED))
    while session.done < LENGTH:
        request = session.request(chunk=4)
        session.record(request, target.forward([request])[0])
    session.check()
    if not whims:
        assert engine.texts["a"].computed == len(session.text) + 12
        widest = max(one.rows for step in engine.steps for one in step.values())
        assert widest == 13, "the first four tokens have the ten rows of a picture"


def test_pictures_that_another_engine_read_are_refused() -> None:
    target = fake_target()
    with pytest.raises(ValueError, match="the model reads text only"):
        target.read_pictures([1], [b"x"], [0])
    target.open("a", 1, GREEDY, (1,))
    with pytest.raises(ValueError, match="'a': these pictures were not read by this engine"):
        target.use_pictures("a", ports.ReadPictures(3, "other"))


def test_noise_and_penalties_of_a_text_with_pictures() -> None:
    """Noise belongs to positions without rows of pictures, penalties to all of vLLM's tokens."""
    arguments = {**arguments_of(4, SAMPLED), "extra_rows": 6}
    text = _Text(arguments)
    block = text.block("a", np.arange(20), 12, (1, 2), 64)
    assert list(block.positions) == [6, 7, 8]
    assert list(text.guess("a", 12, (1, 2), 1, 64).positions) == [8]
    least = _Text({**arguments_of(4, LEAST), "extra_rows": 6})
    assert least.block("a", np.arange(20), 10, (), 64).masks, "no end token before min_tokens"
    assert not least.block("a", np.arange(99), 10 + LENGTH, (), 64).masks

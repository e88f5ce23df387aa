"""Speed of a generation and the estimate for plain streaming. Oracle: passes whose duration is a
known line over their rows."""

from __future__ import annotations

import pytest

from edgespec.core.device.streaming_speed import StreamingSpeed


def run(rows: list[int], tokens: int = 2, *, base_s: float, row_s: float) -> StreamingSpeed:
    """Return the speed after a first pass of a second, and passes that follow without a pause."""
    speed, now = StreamingSpeed(), 5.0
    speed.add(now, tokens, 1.0, 0)
    for count in rows:
        pass_s = base_s + count * row_s
        now += pass_s
        speed.add(now, tokens, pass_s, count)
    return speed


def test_rows_are_taken_off_where_their_number_varies() -> None:
    speed = run([0, 4, 8, 4] * 4, base_s=0.02, row_s=0.001)
    assert speed.plain_tokens_per_s == pytest.approx(50.0)
    assert speed.tokens_per_s == pytest.approx(2 / 0.024)
    assert speed.times_plain == pytest.approx(2 * 0.02 / 0.024)
    assert (speed.tokens, speed.passes, speed.draft_tokens) == (32, 16, 16)


@pytest.mark.parametrize("rows", [[4] * 20, [0, 8]], ids=["no variation", "few passes"])
def test_without_a_slope_the_mean_pass_stands_for_plain_streaming(rows: list[int]) -> None:
    speed = run(rows, base_s=0.02, row_s=0.001)
    assert speed.plain_tokens_per_s == pytest.approx(1 / 0.024)


def test_plain_streaming_is_no_faster_than_the_shortest_pass() -> None:
    speed = run([6, 10] * 10, base_s=0.0, row_s=0.004)
    assert speed.plain_tokens_per_s == pytest.approx(1 / 0.024)


def test_the_first_pass_and_empty_commits_do_not_count() -> None:
    speed = StreamingSpeed()
    assert (speed.tokens_per_s, speed.plain_tokens_per_s, speed.times_plain) == (None, None, None)
    speed.add(1.0, 0, 3.0, 0)
    speed.add(2.0, 5, 3.0, 0)
    assert (speed.tokens_per_s, speed.plain_tokens_per_s) == (None, None)
    speed.add(2.5, 1, 0.5, 0)
    assert (speed.tokens_per_s, speed.plain_tokens_per_s, speed.times_plain) == (2.0, 2.0, 1.0)

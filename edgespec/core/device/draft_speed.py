"""How fast a draft is expected to make a text, as far as settings that cost memory change it.

A model for comparing settings with one another, not for predicting a machine: its times are of one
core of a server's CPU, its acceptance that of a usual pair. What counts is that a step takes longer
the more weights and cached rows it reads, and that a short window and coarse numbers cost some
acceptance. What coarse numbers cost was measured with the bundled pair and rounded up. What a short
window costs cannot be learned from so small a draft, which looks back little: it is a guess on the
side of long windows.
"""

from __future__ import annotations

from edgespec.core.device.kv_type import KvType
from edgespec.core.device.memory_model import DraftSettings, DraftVariant

# A usual pair on a usual link.
_ACCEPTANCE, _SECOND_GUESS, _ROUND_S, _ROW_S = 0.7, 0.3, 0.06, 0.0005
_STEP_S = 0.0003
_WEIGHTS_S_PER_BYTE = 2.8e-10
# Of one product of a query's with a key's or value's number.
_ATTENTION_S = {KvType.FLOAT32: 5.6e-10, KvType.FLOAT16: 5.3e-10, KvType.INT8: 2.7e-10}
_LOST_BY_BITS = {4: 0.005, 8: 0.0, 32: 0.0}
_LOST_BY_TYPE = {KvType.FLOAT32: 0.0, KvType.FLOAT16: 0.0005, KvType.INT8: 0.003}
_LOST_BY_WINDOW = 0.35
_WINDOW_TOKENS = 400.0
# A second thread takes so much of the time away; below so many bytes of weights it takes none.
_SECOND_THREAD, _TWO_THREADS_FROM_BYTES = 0.4, 6_000_000
# How many times cheaper a prompt's token is than a step, by chunk.
_PREFILL_GAIN = {64: 5.0, 32: 4.5, 16: 3.5}
# The runtime reads int8 fast for one token and slowly for many.
_PREFILL_ATTENTION = {KvType.FLOAT32: 1.0, KvType.FLOAT16: 1.0, KvType.INT8: 6.0}
_MOST_GAMMA = 32


def draft_speed(variant: DraftVariant, settings: DraftSettings, text_length: int) -> float:
    """Tokens a second that stop-and-wait drafting at the best draft length brings.

    Formula: max over gamma of (1 - a**(gamma + 1)) / (1 - a) / (gamma * step + round + rows), with
    the acceptance a and the step of below (Leviathan et al. 2211.17192, section 3.3). An acceptance
    of 0.7, steps of 10 ms, a round of 60 ms and free rows make 28.1 tokens a second, at gamma 3.
    """
    rate = acceptance(variant, settings, text_length)
    step_s = draft_step_s(variant, settings, text_length)
    row_s = settings.width * _ROW_S
    return max(
        (1.0 - rate ** (gamma + 1)) / (1.0 - rate) / (gamma * (step_s + row_s) + _ROUND_S)
        for gamma in range(1, _MOST_GAMMA + 1)
    )


def acceptance(variant: DraftVariant, settings: DraftSettings, text_length: int) -> float:
    """The share of steps one of whose guesses is right.

    Formula: b = 0.7 - lost(bits) - lost(type), times 1 - 0.35 * 400 / (400 + W) where a window of W
    is shorter than the text; then 1 - (1 - b) * (1 - 0.3)**(width - 1). Float32 at a window of 600
    tokens of a longer text: 0.7 * (1 - 0.35 * 0.4) = 0.602.
    """
    first = _ACCEPTANCE - _LOST_BY_BITS[variant.bits] - _LOST_BY_TYPE[variant.kv_type]
    if settings.window < text_length:
        first *= 1.0 - _LOST_BY_WINDOW * _WINDOW_TOKENS / (_WINDOW_TOKENS + settings.window)
    return 1.0 - (1.0 - first) * (1.0 - _SECOND_GUESS) ** (settings.width - 1)


def draft_step_s(variant: DraftVariant, settings: DraftSettings, text_length: int) -> float:
    """The time of one step, and the share of prefill that a sliding window costs a token.

    Formula: stored * 0.28 ns + rows * layers * heads * head_dim * 2 * t, t by type 0.56, 0.53,
    0.27 ns, times 0.6 with more threads than one, + 0.3 ms; a token of prefill costs 1/5 of that in
    chunks of 64, but int8 attention six times its t, and each token brings 0.5 of one, or 1.5
    where the window slides. 375 MB and 1000 rows of 28 layers of 16
    heads of 128 float32 numbers: 105 + 64 ms in one thread.
    """
    sliding = settings.window < text_length
    rows = 0.75 * settings.window if sliding else 0.5 * text_length
    weights_s = variant.stored_bytes * _WEIGHTS_S_PER_BYTE
    numbers = rows * variant.layers * variant.heads * variant.head_dim * 2
    two = settings.threads > 1 and variant.stored_bytes >= _TWO_THREADS_FROM_BYTES
    share = 1.0 - _SECOND_THREAD if two else 1.0
    attention_s = numbers * _ATTENTION_S[variant.kv_type]
    step_s = (weights_s + attention_s) * share + _STEP_S
    prefill_s = (weights_s + attention_s * _PREFILL_ATTENTION[variant.kv_type]) * share
    prefill_s /= _PREFILL_GAIN[settings.chunk]
    # A prompt of half the text is prefilled in any case; a window feeds one more token a token.
    return step_s + prefill_s * (1.5 if sliding else 0.5)

"""DSPy's language model over both APIs, and a prediction."""

from __future__ import annotations

import dspy
import parts

SETTINGS = {
    "model": f"openai/{parts.MODEL}",
    "api_base": f"{parts.URL}/v1",
    "api_key": "none",
    "max_tokens": 512,
    "cache": False,
    "num_retries": 0,
}
lm = dspy.LM(**SETTINGS)
dspy.configure(lm=lm)


def text_of(found) -> str:
    return found["text"] if isinstance(found, dict) else str(found)


def plain():
    return text_of(lm(parts.ASK["plain"])[0])


def predict():
    return dspy.Predict("question -> answer")(question=parts.ASK["plain"]).answer


def responses():
    model = dspy.LM(model_type="responses", **SETTINGS)
    return text_of(model(parts.ASK["plain"])[0])


parts.run_parts(plain=plain, predict=predict, responses=responses)

"""LiteLLM's proxy in front of the endpoint, with OpenAI's and Anthropic's paths."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import parts

CONFIG = {
    "model_list": [
        {
            "model_name": "edgespec",
            "litellm_params": {
                "model": f"openai/{parts.MODEL}",
                "api_base": f"{parts.URL}/v1",
                "api_key": "none",
            },
        }
    ]
}
KEY = "sk-of-the-proxy"
PORT = parts.free_port()


@contextlib.contextmanager
def proxy() -> Iterator[str]:
    """Run the proxy; yield its address."""
    Path("litellm.json").write_text(json.dumps(CONFIG))
    program = shutil.which("litellm") or "litellm"
    command = [program, "--config", "litellm.json", "--host", "127.0.0.1", "--port", str(PORT)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "LITELLM_MASTER_KEY": KEY},
    ) as process:
        try:
            parts.read_until(process, "Uvicorn running")
            yield f"http://127.0.0.1:{PORT}"
        finally:
            process.terminate()


def post(url: str, path: str, **data: object):
    request = urllib.request.Request(
        url + path,
        json.dumps({"model": "edgespec", **data}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def messages(question: str):
    return [{"role": "user", "content": question}]


with proxy() as URL:

    def plain():
        reply = post(URL, "/v1/chat/completions", messages=messages(parts.ASK["plain"]))
        return json.loads(reply)["choices"][0]["message"]["content"]

    def stream():
        asked = messages(parts.ASK["plain"])
        text = post(URL, "/v1/chat/completions", messages=asked, stream=True)
        lines = [one[6:] for one in text.splitlines() if one.startswith("data: {")]
        choices = [json.loads(one)["choices"] for one in lines]
        return parts.join_pieces(one[0]["delta"].get("content") for one in choices if one)

    def tools():
        asked, tools = messages(parts.ASK["tools"]), [parts.OPENAI_TOOL]
        while True:
            reply = post(URL, "/v1/chat/completions", messages=asked, tools=tools)
            message = json.loads(reply)["choices"][0]["message"]
            if not message.get("tool_calls"):
                return message["content"]
            asked.append(message)
            for call in message["tool_calls"]:
                weather = parts.read_weather(call["function"]["arguments"])
                asked.append({"role": "tool", "tool_call_id": call["id"], "content": weather})

    def messages_api():
        reply = post(URL, "/v1/messages", max_tokens=256, messages=messages(parts.ASK["plain"]))
        return "".join(one.get("text", "") for one in json.loads(reply)["content"])

    def responses():
        reply = json.loads(post(URL, "/v1/responses", input=parts.ASK["plain"]))
        items = [one for one in reply["output"] if one["type"] == "message"]
        return items[0]["content"][0]["text"]

    parts.run_parts(
        plain=plain,
        stream=stream,
        tools=tools,
        messages_api=messages_api,
        responses=responses,
    )

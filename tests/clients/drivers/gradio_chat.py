"""Gradio's page for a chat, driven through the interface that its page uses."""

from __future__ import annotations

import gradio
import parts
from gradio_client import Client

page = gradio.load_chat(
    f"{parts.URL}/v1", model=parts.MODEL, token="none", file_types=None, api_name="chat"
)
_, address, _ = page.launch(
    prevent_thread_lock=True,
    quiet=True,
    show_error=True,
    server_name="127.0.0.1",
    server_port=parts.free_port(),
)


def plain():
    return Client(address, verbose=False).predict(parts.ASK["plain"], api_name="/chat")


def stream():
    job = Client(address, verbose=False).submit(parts.ASK["plain"], api_name="/chat")
    answer = job.result()
    if len(job.outputs()) < 2:
        raise ValueError("the page showed the answer in one piece")
    return answer


parts.run_parts(plain=plain, stream=stream)
page.close()

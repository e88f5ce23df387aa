"""Pictures over HTTP: the forms of four APIs, bounds, and pictures by their address.

Oracle: the toy's law for these pictures at the place of its placeholder, token by token.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from edgespec.config import EndpointSection, VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.protocol.pictures import PictureInput, check_picture
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint import pictures as fetching
from edgespec.endpoint.chat_prompt import write_chat_prompt
from edgespec.endpoint.pictures import PICTURE_PART, PictureUrlError, fetch, is_public
from edgespec.models.tokenizer import ChatTemplate
from edgespec.models.toy import TOY_MODEL, TOY_PICTURE, ToyTokenizer
from edgespec.verifier.targets.toy import ToyTarget
from tests.endpoint.live_endpoint import (
    ask,
    events_of,
    over_nobody,
    over_toy,
    over_verifiers,
)
from tests.kit.live_verifier import serve_toy, toy_text
from tests.kit.pictures import gif, png, solid_png

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
LENGTH = 20
CAT, DOG = png(96, 64, size=90_000, seed=1), png(64, 64, size=300, seed=2)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


def image(data: bytes | str) -> dict[str, Any]:
    """Return a picture as OpenAI's chat API has it: these bytes, or this address."""
    url = data if isinstance(data, str) else data_url(data)
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "max_tokens": LENGTH, "ignore_eos": True, **more}


def expected_text(prompt: str, *pictures: bytes) -> str:
    """Return the greedy output behind a prompt, with these pictures at the places of its 9s."""
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    model = TOY_MODEL
    if pictures:
        target = ToyTarget(TOY_MODEL, pictures=PictureInput(TOY_PICTURE))
        seed = target.read_pictures((), pictures, ()).content
        assert isinstance(seed, int)
        model = TOY_MODEL.perturbed(0.5, seed)
    tokenizer = ToyTokenizer()
    return tokenizer.decode(toy_text(tokenizer.encode(prompt), params, model))


def anthropic_image(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    return {"type": "image", "source": source}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        pytest.param(
            CHAT,
            chat(text("a"), image(CAT), text("b"), image(DOG)),
            lambda found: found["choices"][0]["message"]["content"],
            id="openai-chat",
        ),
        pytest.param(
            RESPONSES,
            {
                "input": user(
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": data_url(CAT), "detail": "low"},
                    {"type": "input_text", "text": "b"},
                    {"type": "input_image", "image_url": data_url(DOG)},
                ),
                "max_output_tokens": LENGTH,
                "ignore_eos": True,
            },
            lambda found: found["output"][0]["content"][0]["text"],
            id="openai-responses",
        ),
        pytest.param(
            MESSAGES,
            {
                "messages": user(text("a"), anthropic_image(CAT), text("b"), anthropic_image(DOG)),
                "max_tokens": LENGTH,
                "ignore_eos": True,
            },
            lambda found: found["content"][0]["text"],
            id="anthropic",
        ),
    ],
)
async def test_pictures_stand_where_the_client_put_them(
    path: str, body: dict[str, Any], read: Callable[[Any], str]
) -> None:
    async with over_toy() as live:
        reply = await ask(live, path, body)
        assert reply.status == 200, reply.body
        assert read(reply.json) == expected_text("a9b9 ", CAT, DOG)


async def test_several_photos_fit_in_a_request_by_default() -> None:
    """Oracle: the toy's law for these pictures, of 3.5 MB each."""
    photos = [png(64, 64, size=3_500_000, seed=number) for number in range(3)]
    async with over_toy() as live:
        reply = await ask(live, CHAT, chat(text("a"), *map(image, photos)))
        assert reply.status == 200, reply.body
        found = reply.json["choices"][0]["message"]["content"]
        assert found == expected_text("a999 ", *photos)


@pytest.mark.parametrize("path", [OLLAMA_CHAT, OLLAMA_GENERATE])
async def test_ollamas_images_stand_in_front_of_the_text(path: str) -> None:
    images = [base64_of(CAT), data_url(DOG)]
    body: dict[str, Any] = {"prompt": "ab", "images": images}
    if path == OLLAMA_CHAT:
        body = {"messages": [{"role": "user", "content": "ab", "images": images}]}
    options = {"num_predict": LENGTH, "ignore_eos": True}
    async with over_toy() as live:
        sent = {"model": "toy", "stream": False, "ignore_eos": True, "options": options, **body}
        reply = await ask(live, path, sent)
        assert reply.status == 200, reply.body
        found = reply.json["message"]["content"] if path == OLLAMA_CHAT else reply.json["response"]
        assert found == expected_text("99ab ", CAT, DOG)


PICTURED = user(text("a"), image(CAT), text("b"), image(DOG))
USAGES: dict[str, tuple[dict[str, Any], Callable[[bytes], list[int]]]] = {
    CHAT: (
        {"messages": PICTURED, "stream_options": {"include_usage": True}},
        lambda body: [events_of(body)[-2]["usage"]["prompt_tokens"]],
    ),
    RESPONSES: (
        {
            "input": user(
                {"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": data_url(CAT)},
                {"type": "input_text", "text": "b"},
                {"type": "input_image", "image_url": data_url(DOG)},
            )
        },
        lambda body: [
            named_events(body)["response.incomplete"]["response"]["usage"]["input_tokens"]
        ],
    ),
    MESSAGES: (
        {"messages": user(text("a"), anthropic_image(CAT), text("b"), anthropic_image(DOG))},
        lambda body: [
            named_events(body)["message_start"]["message"]["usage"]["input_tokens"],
            named_events(body)["message_delta"]["usage"]["input_tokens"],
        ],
    ),
    OLLAMA_CHAT: (
        {
            "messages": [
                {"role": "user", "content": "ab", "images": [base64_of(CAT), base64_of(DOG)]}
            ]
        },
        lambda body: [json.loads(body.splitlines()[-1])["prompt_eval_count"]],
    ),
}


def named_events(body: bytes) -> dict[str, Any]:
    """Return the data of a stream's last event of each name."""
    blocks = [one.split("\ndata: ", 1) for one in body.decode().split("\n\n") if one]
    return {
        name.removeprefix("event: "): json.loads(data[0])
        for name, *data in blocks
        if data and data[0] != "[DONE]"
    }


@pytest.mark.parametrize("path", USAGES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_usage_counts_the_rows_of_pictures(path: str, stream: bool) -> None:
    """Ninety-six by 64 pixels are six rows of the toy, and 64 by 64 are four. The template writes
    two letters, two placeholders and the end of the message."""
    body, read_stream = USAGES[path]
    sent = {"model": "toy", "max_tokens": LENGTH, "stream": stream, **body}
    if not stream:
        sent.pop("stream_options", None)
    async with over_toy() as live:
        reply = await ask(live, path, sent)
        assert reply.status == 200, reply.body
        if stream:
            found = read_stream(reply.body)
        else:
            usage = reply.json.get("usage", reply.json)
            names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
            found = [usage[name] for name in names if name in usage]
        assert found == [5 + 8] * len(found)
        assert live.endpoint.counts.prompt_tokens.total() == 5 + 8


async def test_several_choices_count_their_prompt_once() -> None:
    async with over_toy() as live:
        reply = await ask(live, CHAT, chat(image(CAT), n=3))
        assert reply.json["usage"]["prompt_tokens"] == len(ToyTokenizer().encode("9 ")) + 5


async def test_a_request_of_ollama_with_pictures_alone_loads_no_model() -> None:
    async with over_toy() as live:
        sent = {"model": "toy", "stream": False, "images": [base64_of(CAT)], "ignore_eos": True}
        reply = await ask(live, OLLAMA_GENERATE, {**sent, "options": {"num_predict": LENGTH}})
        assert reply.json["response"] == expected_text("9 ", CAT)


async def test_a_picture_in_the_result_of_a_tool_follows_it() -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [text("seen"), anthropic_image(CAT)],
    }
    messages = [
        *user(text("a")),
        {"role": "assistant", "content": [call]},
        *user(result, text("now")),
    ]
    async with over_toy() as live:
        body = {"messages": messages, "max_tokens": LENGTH, "ignore_eos": True}
        reply = await ask(live, MESSAGES, body)
        assert reply.status == 200, reply.body
        assert live.verifier is not None
        assert live.verifier.engine.pictures.missed == 1


async def test_a_streamed_answer_and_the_next_turn_send_the_picture_once() -> None:
    async with over_toy() as live:
        assert live.verifier is not None
        store = live.verifier.engine.pictures
        streamed = await ask(live, CHAT, chat(image(CAT), text("a"), stream=True))
        deltas = [one["choices"][0]["delta"] for one in events_of(streamed.body)[:-1]]
        answer = "".join(one.get("content") or "" for one in deltas)
        assert answer == expected_text("9a ", CAT)
        turn = chat(image(CAT), text("a"))
        turn["messages"] += [
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": [text("c")]},
        ]
        reply = await ask(live, CHAT, turn)
        assert reply.json["choices"][0]["message"]["content"] == expected_text("9a b c ", CAT)
        assert (store.missed, store.found, store.received_bytes) == (1, 1, len(CAT))


async def test_the_choices_of_a_request_send_their_picture_once() -> None:
    async with over_toy() as live:
        assert live.verifier is not None
        reply = await ask(live, CHAT, chat(image(CAT), n=4))
        texts = [one["message"]["content"] for one in reply.json["choices"]]
        assert texts == [expected_text("9 ", CAT)] * 4
        assert live.verifier.engine.pictures.received_bytes == len(CAT)


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        pytest.param(
            [image(png(5000, 4000))],
            "messages[0].content[0].image_url.url",
            "has 5000 x 4000 = 20000000 pixels, but a picture may have at most 16777216",
            id="pixels",
        ),
        pytest.param(
            [image(png(size=(1 << 20) + 1))],
            "messages[0].content[0].image_url.url",
            "has 1048577 bytes, but a picture may have at most 1048576",
            id="bytes",
        ),
        pytest.param(
            [image(DOG)] * 3,
            "messages[0].content[2].image_url.url",
            "the request has 3 pictures, but at most 2",
            id="count",
        ),
        pytest.param(
            [text("a"), image(b"<svg/>")],
            "messages[0].content[1].image_url.url",
            "is no picture in a known format (PNG, JPEG, WebP or GIF)",
            id="format",
        ),
        pytest.param(
            [image("data:image/png;base64,!")],
            "messages[0].content[0].image_url.url",
            "is no base64",
            id="base64",
        ),
        pytest.param(
            [image("data:image/png,abc")],
            "messages[0].content[0].image_url.url",
            "is 'data:image/png,abc', but a data URL must be in base64",
            id="plain-data-url",
        ),
        pytest.param(
            [image("file:///etc/passwd")],
            "messages[0].content[0].image_url.url",
            "is 'file:///etc/passwd', but must be a data URL, http:// or https://",
            id="file",
        ),
        pytest.param(
            [image("https://pictures.example/cat.png")],
            "messages[0].content[0].image_url.url",
            "is not fetched here: send a data URL, or start the endpoint with --set endpoint.p",
            id="address",
        ),
        pytest.param(
            [{"type": "image_url", "image_url": "ftp:x"}],
            "messages[0].content[0].image_url",
            "is 'ftp:x', but must be a data URL",
            id="url-as-a-text",
        ),
        pytest.param(
            [text("a 9"), image(DOG)],
            "messages",
            "has 2 placeholders (token 62) for 1 pictures",
            id="placeholder-in-a-text",
        ),
    ],
)
async def test_a_bound_is_a_400_that_names_field_value_and_limit(
    content: list[Any], param: str, words: str
) -> None:
    limits = LimitsSection(max_pictures=2, max_picture_mib=1)
    async with serve_toy(config=VerifierConfig(model="toy", port=0, limits=limits)) as (address, _):
        async with over_verifiers(address) as live:
            reply = await ask(live, CHAT, chat(*content))
            assert reply.status == 400, reply.body
            assert reply.json["error"]["param"] == param
            assert words in reply.json["error"]["message"]


async def test_a_model_that_reads_text_only_is_a_400_before_any_work() -> None:
    limits = LimitsSection(picture_mib=0)
    config = VerifierConfig(model="toy", port=0, limits=limits)
    async with serve_toy(config=config) as (address, verifier):
        async with over_verifiers(address) as live:
            reply = await ask(live, CHAT, chat(image(DOG)))
            message = reply.json["error"]["message"]
            assert reply.status == 400
            assert message == (
                "messages[0].content[0].image_url.url is a picture, but the model 'toy' reads text"
                " only here"
            )
            assert not verifier.engine.pictures.missed


async def test_without_a_verifier_pictures_wait_for_none() -> None:
    async with over_nobody() as live:
        reply = await ask(live, CHAT, chat(image(DOG)))
        assert reply.status == 503
        assert "no verifier has reported which models read them" in reply.json["error"]["message"]


async def test_a_picture_that_the_target_cannot_read_is_a_400() -> None:
    class Picky(ToyTarget):
        def read_pictures(self, *_: Any) -> Any:
            raise ValueError("picture 0 is broken\nin the middle")

    target = Picky(TOY_MODEL, pictures=PictureInput(TOY_PICTURE), vocabulary="toy-64")
    async with over_toy(target) as live:
        reply = await ask(live, CHAT, chat(image(DOG)))
        assert reply.status == 400, reply.body
        words = "the pictures cannot be read: picture 0 is broken in the middle"
        assert words in reply.json["error"]["message"]


# --- chat templates -----------------------------------------------------------------------------

STRING_OR_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p['type'] == 'image' %}<img>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)
PARTS_ONLY = (  # SmolVLM's way
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}"
    "{{ p['text'] }}{% elif p['type'] == 'image' %}<img>{% endif %}{% endfor %}|{% endfor %}"
)
MESSAGES_WITH_PICTURE: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [PICTURE_PART, text("look")]},
    {"role": "user", "content": "again"},
]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(STRING_OR_PARTS, "s|<img>look|again|", id="string-or-parts"),
        pytest.param(PARTS_ONLY, "system:s|user:<img>look|user:again|", id="parts-only"),
        pytest.param(
            STRING_OR_PARTS.replace(
                "{% for m in messages %}",
                "{% for m in messages %}{% if loop.index > 1 and m.role =="
                " messages[loop.index0 - 1].role %}{{ raise_exception('no') }}{% endif %}",
                1,
            ),
            "s|<img>look\n\nagain|",
            id="joined-neighbours",
        ),
    ],
)
def test_templates_of_vision_models_get_the_form_that_they_read(source: str, expected: str) -> None:
    assert write_chat_prompt(ChatTemplate(source), MESSAGES_WITH_PICTURE, ()).text == expected


def test_a_template_of_parts_shows_texts_without_pictures_too() -> None:
    template = ChatTemplate(PARTS_ONLY)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    assert template.render(messages) == "user:hi|assistant:so|"
    assert template.render(messages, continue_final_message=True) == "user:hi|assistant:so"


# --- pictures by their address ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a01:203", False),
        ("2002:7f00:1::", False),
    ],
)
def test_only_addresses_of_the_public_internet_are_dialed(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@contextlib.asynccontextmanager
async def web_server(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve these answers, one for each connection; yield the address, and the requests so far."""
    left, requests = list(answers), list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(left.pop(0))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests


def ok(body: bytes, *, states_length: bool = True) -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if states_length else ""
    return f"HTTP/1.1 200 OK\r\n{length}Connection: close\r\n\r\n".encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def anywhere(address: str) -> bool:
    return True


@pytest.mark.parametrize("states_length", [True, False])
async def test_a_picture_is_fetched(states_length: bool) -> None:
    async with web_server(ok(CAT, states_length=states_length)) as (url, requests):
        found = await asyncio.to_thread(fetch, f"{url}/a/cat.png?x=1", 90_000, is_public=anywhere)
    assert found == CAT
    assert requests[0].startswith(b"GET /a/cat.png?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_redirects_are_followed_and_bounded() -> None:
    async with web_server(redirect("/b"), redirect("../c", 308), ok(DOG)) as (url, requests):
        assert await asyncio.to_thread(fetch, f"{url}/a", 999, is_public=anywhere) == DOG
        assert [one.split()[1] for one in requests] == [b"/a", b"/b", b"/c"]
    async with web_server(*[redirect("/again")] * 4) as (url, requests):
        with pytest.raises(PictureUrlError, match="it has more than 3 redirects"):
            await asyncio.to_thread(fetch, url, 999, is_public=anywhere)
        assert len(requests) == 4


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(ok(bytes(1000)), "has more than 999 bytes", id="large"),
        pytest.param(ok(bytes(200_000), states_length=False), "has more than 999", id="endless"),
        pytest.param(
            b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "the server answers 404", id="missing"
        ),
        pytest.param(b"SSH-2.0-x\r\n", "cannot be fetched: BadStatusLine", id="no-http"),
        pytest.param(redirect("file:///etc/passwd"), "neither http:// nor https://", id="file"),
        pytest.param(redirect("http://a:b@c/"), "a URL with a user's name", id="password"),
    ],
)
async def test_what_cannot_be_fetched_is_said(answer: bytes, words: str) -> None:
    async with web_server(answer) as (url, _):
        with pytest.raises(PictureUrlError, match=words):
            await asyncio.to_thread(fetch, url, 999, is_public=anywhere)


async def test_a_redirect_to_this_machine_is_not_followed() -> None:
    """The first address counts as public here, and the one behind the redirect does not."""
    async with web_server(redirect("http://localhost:1/")) as (url, requests):
        asked: list[str] = []

        def first_only(address: str) -> bool:
            asked.append(address)
            return len(asked) == 1

        with pytest.raises(PictureUrlError, match="'localhost', which is no address of the public"):
            await asyncio.to_thread(fetch, url, 999, is_public=first_only)
        assert len(requests) == 1


def test_fetching_has_a_time_limit() -> None:
    times = iter([0.0, fetching.FETCH_WITHIN_S])
    with pytest.raises(PictureUrlError, match="cannot be fetched: TimeoutError"):
        fetch("http://127.0.0.1:1/", 9, is_public=anywhere, clock=lambda: next(times))


async def test_an_endpoint_that_may_fetch_never_dials_this_machine() -> None:
    async with serve_toy() as (address, _), web_server(ok(DOG)) as (url, requests):
        settings = EndpointSection(picture_urls=True)
        async with over_verifiers(address) as live:
            live.endpoint.settings = settings
            reply = await ask(live, CHAT, chat(image(f"{url}/cat.png")))
            assert reply.status == 400
            words = "leads to '127.0.0.1', which is no address of the public internet"
            assert words in reply.json["error"]["message"]
            assert not requests


async def test_an_endpoint_that_may_fetch_uses_what_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fetched(url: str, max_bytes: int) -> bytes:
        asked.append((url, max_bytes))
        return DOG

    monkeypatch.setattr(fetching, "fetch", fetched)
    async with over_toy() as live:
        live.endpoint.settings = EndpointSection(picture_urls=True)
        body = chat(image("https://pictures.example/dog.png"), image(CAT))
        reply = await ask(live, CHAT, body)
        content = reply.json["choices"][0]["message"]["content"]
        assert content == expected_text("99 ", DOG, CAT)
        assert asked == [("https://pictures.example/dog.png", 8 << 20)]


def test_real_files_are_read_too() -> None:
    header = check_picture(solid_png(7, 5), PictureInput(1))
    assert (header.width, header.height) == (7, 5)
    assert check_picture(gif(2, 2), PictureInput(1)).format == "GIF"

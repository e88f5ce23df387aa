"""The chat page in a real browser, over an agent with a script. Oracles: the script's own pieces,
the requests that reached the agent, and a console that stays empty."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.running import listen
from edgespec.config import EndpointSection
from edgespec.core.device.token_origins import TokenOrigin
from edgespec.device.prober import VerifierMonitor
from edgespec.endpoint.app import build_app
from edgespec.endpoint.pages import rendered_page
from edgespec.endpoint.server import EndpointServer
from edgespec.endpoint.service import Endpoint
from edgespec.models.toy import ToyTokenizer
from tests.endpoint.browser import is_idle, open_browser, send, shows
from tests.endpoint.live_endpoint import Live, ScriptedAgent, over_script, over_toy
from tests.endpoint.test_fallback import over_fallback

pytestmark = pytest.mark.slow

ORIGINS = (
    TokenOrigin.DEVICE_MODEL,
    TokenOrigin.DEVICE_LOOKUP,
    TokenOrigin.SERVER,
    TokenOrigin.TARGET,
)
PIECES = ("The ", "quick ", "brown ", "fox ", "jumps.")


class Gate:
    """Holds a script at one place until it is opened, and is set when the script waits there."""

    def __init__(self, place: int) -> None:
        self._place, self.reached, self.opened = place, asyncio.Event(), asyncio.Event()

    async def __call__(self, place: int) -> None:
        if place == self._place:
            self.reached.set()
            await self.opened.wait()


def page_of(live: Live) -> str:
    return f"http://127.0.0.1:{live.port}/"


def asked(agent: ScriptedAgent) -> list[str]:
    return [ToyTokenizer().decode(prompt).strip() for prompt in agent.prompts]


@pytest.mark.parametrize("name", ["chat", "status"])
def test_a_page_runs_its_own_script_only(name: str) -> None:
    page, policy = rendered_page(name)
    text = page.decode()
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert not re.findall(
        r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|url\(|@import", text
    )
    assert not re.findall(r"\son\w+=\"|\sstyle=", text)
    fetched = re.findall(r"(?:src|href)=\"([^\"]*)\"", text)
    assert all(not one.startswith(("http:", "https:", "//")) for one in fetched)
    assert text.count("<script") == 1
    assert text.count("</script") == 1


async def test_an_answer_streams_in_the_colours_of_its_tokens() -> None:
    gate = Gate(3)
    agent = ScriptedAgent(PIECES, origins=ORIGINS, between=gate)
    async with over_script(agent) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await send(page, "hello")
        await gate.reached.wait()
        await shows(page, ".assistant", "brown")
        assert await page.locator("#send").get_attribute("aria-label") == "Stop"
        assert "fox" not in await page.inner_text(".assistant")
        gate.opened.set()
        await is_idle(page)
        assert await page.inner_text(".assistant > .markdown:not(.thought *)") == "".join(PIECES)
        shown = await page.evaluate(
            "[...document.querySelectorAll('.assistant .t')].map(one => one.className)"
        )
        kinds = [one.split()[1] for one in shown]
        names = [one.value.replace(" ", "-") for one in ORIGINS]
        assert kinds == [*names, names[0]]
        figures = await page.inner_text(".assistant .figures")
        # A token every 5 ms, and passes of 10 ms for plain streaming.
        assert "200.0 tokens/s" in figures
        assert "2.00 times plain streaming (estimated 100.0)" in figures
        assert "40 % device model, 20 % device lookup, 20 % server, 20 % target" in figures
        await page.click("text=Timeline")
        await page.click("text=Step back")
        assert (await page.inner_text(".timeline .text")).strip() == "The quick brown fox"
        await page.locator("label.switch", has_text="Colours").click()
        assert await page.locator(".assistant .t").count() == 0
        assert browser.said == []
    assert asked(agent) == ["hello"]


async def test_stop_retry_and_edit() -> None:
    gate = Gate(2)
    agent = ScriptedAgent(PIECES, between=gate)
    async with over_script(agent) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await send(page, "first")
        await gate.reached.wait()
        await shows(page, ".assistant", "The quick")
        await page.keyboard.press("Escape")
        await is_idle(page)
        assert "stopped" in await page.inner_text(".assistant .figures")
        assert "The quick" in await page.inner_text(".assistant")
        agent.between = None
        await page.click("text=Retry")
        await shows(page, ".assistant", "jumps.")
        await is_idle(page)
        await send(page, "second")
        await page.locator(".assistant").nth(1).wait_for()
        await is_idle(page)
        await page.locator(".message.user").first.hover()
        await page.locator(".message.user").first.get_by_text("Edit").click()
        await page.locator(".edit textarea").fill("third")
        await page.keyboard.press("Enter")
        await shows(page, ".message.user .bubble", "third")
        await is_idle(page)
        assert await page.inner_text(".message.user .bubble") == "third"
        assert browser.said == []
    questions = asked(agent)
    assert [questions[0], questions[1], questions[-1]] == ["first", "first", "third"]
    assert questions[2].startswith("first")
    assert questions[2].endswith("second")


async def test_conversations_stay_in_the_browser() -> None:
    agent = ScriptedAgent(PIECES, origins=ORIGINS)
    async with over_script(agent) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await send(page, "remember me")
        await is_idle(page)
        await page.wait_for_url(re.compile("#.+"))
        await page.reload()
        await page.wait_for_selector("html[data-ready]", state="attached")
        assert "jumps." in await page.inner_text(".assistant")
        assert await page.locator(".assistant .t.server").count() == 1
        await page.keyboard.press("Control+k")
        assert await page.is_visible("#welcome")
        await send(page, "another one")
        await is_idle(page)
        names = await page.locator("#conversations .open").all_inner_texts()
        assert names == ["another one", "remember me"]
        page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        async with page.expect_download() as download:
            await page.click("#export-all")
        exported = await download.value
        assert exported.suggested_filename == "edgespec-conversations.json"
        file = Path(await exported.path())
        kept = json.loads(await asyncio.to_thread(file.read_text, encoding="utf-8"))
        await (
            page.locator("#conversations li", has_text="another one").get_by_title("Delete").click()
        )
        await page.locator("#conversations li", has_text="another").wait_for(state="detached")
        await page.reload()
        await page.wait_for_selector("html[data-ready]", state="attached")
        assert await page.locator("#conversations .open").all_inner_texts() == ["remember me"]

        async def load(content: bytes) -> None:
            file = {"name": "a.json", "mimeType": "application/json", "buffer": content}
            await page.set_input_files("#import-file", file)

        await load(json.dumps(kept).encode())
        await shows(page, "#notice", "2 conversations were imported")
        names = await page.locator("#conversations .open").all_inner_texts()
        assert sorted(names) == ["another one", "remember me", "remember me"]
        await page.locator("#conversations .open", has_text="another one").click()
        await shows(page, ".assistant", "jumps.")
        for number, broken in enumerate((b"no json", b'{"messages": [{"role": "evil"}]}', b"[1]")):
            await page.evaluate("notify('')")
            await load(broken)
            await shows(page, "#notice", "Nothing was imported")
            assert await page.locator("#conversations li").count() == 3, number
        assert browser.said == []


HOSTILE = """# <img src=x onerror="window.hacked = 1">

<script>window.hacked = 2</script>

[one](javascript:window.hacked=3) [two](data:text/html,<script>window.hacked=4</script>)
[three](https://example.com/a_(b) "title") and <https://example.org/x?y=1&z=2>.
![picture](https://example.com/secret.png) `</code><script>window.hacked = 5</script>`

| a | b |
|---|:-:|
| <b onclick="window.hacked = 6">x</b> | **bold** |

- item
  - inner <svg onload="window.hacked = 7">

```html
<script>window.hacked = 8</script>
```

<style>body { display: none }</style><iframe src="javascript:window.hacked = 9"></iframe>
"""


async def test_hostile_markdown_is_only_text() -> None:
    agent = ScriptedAgent(re.findall(r".{1,7}", HOSTILE, re.DOTALL), origins=ORIGINS)
    async with over_script(agent) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await send(page, "hello")
        await is_idle(page)
        assert await page.evaluate("window.hacked === undefined")
        inside = "#messages script, #messages img, #messages svg, #messages iframe, #messages style"
        assert await page.locator(inside).count() == 0
        hostile = "#messages [onclick], #messages [onerror], #messages [onload]"
        assert await page.locator(hostile).count() == 0
        links = await page.evaluate(
            "[...document.querySelectorAll('.assistant a')].map(one => [one.href, one.rel])"
        )
        assert {address for address, _ in links} == {
            "https://example.com/a_(b)",
            "https://example.org/x?y=1&z=2",
            "https://example.com/secret.png",
        }
        assert all("noopener" in rel for _, rel in links)
        text = await page.inner_text(".assistant")
        for number in range(1, 10):
            assert re.search(rf"window\.hacked ?= ?{number}", text), number
        assert await page.inner_text(".assistant td strong") == "bold"
        assert await page.inner_text(".assistant pre") == "<script>window.hacked = 8</script>"
        assert browser.said == []


MARKDOWN = {
    "a *b* **c** `d*e*`": "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code></p>",
    "## Title ##\ntext": "<h2>Title</h2><p>text</p>",
    "1. a\n2. b\n\n   more": "<ol><li>a</li><li>b<p>more</p></li></ol>",
    "3) a": '<ol start="3"><li>a</li></ol>',
    "- a\n  - b\n- c": "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>",
    "snake_case_name and 2*3*4": "<p>snake_case_name and 2<em>3</em>4</p>",
    "> a\n> b": "<blockquote><p>a<br>b</p></blockquote>",
    "a\n\n---\nb": "<p>a</p><hr><p>b</p>",
    "\\*no\\*": "<p>*no*</p>",
    "**open": "<p>**open</p>",
    "": "",
}


async def test_markdown_is_read_as_people_write_it() -> None:
    async with over_script(ScriptedAgent()) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        read = (
            "text => { const root = document.createElement('div');"
            " new MarkdownView(root).draw(text); return root.innerHTML; }"
        )
        drawn = {text: await page.evaluate(read, text) for text in MARKDOWN}
        assert drawn == MARKDOWN
        # Growing letter by letter, with tokens of three letters, ends in the same text.
        grown = await page.evaluate(
            """text => {
              const root = document.createElement('div'), view = new MarkdownView(root);
              const runs = [];
              for (let end = 1; end <= text.length; end += 1) {
                if (end % 3 === 1) runs.push(['server', 0]);
                runs[runs.length - 1][1] += 1;
                view.draw(text.slice(0, end), runs);
              }
              const whole = document.createElement('div');
              new MarkdownView(whole).draw(text);
              return [root.textContent, whole.textContent];
            }""",
            HOSTILE,
        )
        assert grown[0] == grown[1]
        assert browser.said == []


async def test_a_key_is_asked_for_once() -> None:
    agent = ScriptedAgent(PIECES)
    async with over_script(agent, key="secret") as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await page.fill("#key", "wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#wrong-key:not(:empty)")
        await page.fill("#key", "secret")
        await page.keyboard.press("Enter")
        await send(page, "hello")
        await is_idle(page)
        assert "jumps." in await page.inner_text(".assistant")
        await page.reload()
        await page.wait_for_selector("html[data-ready]", state="attached")
        assert not await page.is_visible("#ask")
        assert await page.evaluate("JSON.stringify(localStorage).includes('secret')") is False
        assert browser.said == []


async def test_drafts_off_and_the_comparison() -> None:
    agent = ScriptedAgent(PIECES, origins=ORIGINS)
    async with over_script(agent) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await send(page, "hello")
        await is_idle(page)
        await page.click("text=Compare without drafts")
        await page.wait_for_selector(".comparison .row.with")
        shown = await page.inner_text(".comparison")
        assert "The two texts are equal" in shown
        assert "With drafts it was 1.00 times as fast" in shown
        assert "went on drafting by itself" in shown, "the script has tokens of the server"
        await page.locator("label.switch", has_text="Drafts").click()
        await send(page, "again")
        await page.locator(".assistant").nth(1).wait_for()
        await is_idle(page)
        assert "without drafts" in await page.locator(".assistant .figures").last.inner_text()
        assert browser.said == []
    assert agent.drafts == [True, False, False]
    seeds = [one.seed for one in agent.samplings]
    assert seeds[0] == seeds[1] != seeds[2]


async def test_settings_reach_the_request_and_tools_are_shown() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    agent = ScriptedAgent([call])
    async with over_script(agent, HermesToy()) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await page.wait_for_selector("html[data-ready]", state="attached")
        await page.click("#open-settings")
        await page.fill("#system", "be brief")
        for name, value in (
            ("temperature", "0.5"),
            ("top_p", "0.9"),
            ("max_tokens", "7"),
            ("seed", "5"),
        ):
            await page.fill(f"#{name}", value)
        await page.fill("#tools", "[broken")
        await send(page, "hello")
        await page.wait_for_selector("#wrong-option:not(:empty)")
        await page.fill(
            "#tools", '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'
        )
        await page.click("#close-settings")
        await page.locator(".message.user").first.hover()
        await page.locator(".message.user").first.get_by_text("Edit").click()
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".assistant .call")
        assert "Call of weather" in await page.inner_text(".assistant .call")
        assert '"city": "Oslo"' in await page.inner_text(".assistant .call pre")
        agent.pieces = ["rain"]
        await page.fill(".assistant .call textarea", "12 degrees")
        await page.click("text=Send the result")
        await shows(page, ".assistant", "rain")
        await is_idle(page)
        await page.locator(".assistant").last.get_by_text("Raw").click()
        raw = await page.inner_text("#raw-body")
        assert '"tool_call_id"' in raw
        assert '"token_sources": true' in raw
        assert raw.count("curl -N http://127.0.0.1:") == 1
        assert browser.said == []
    sampling = agent.samplings[0]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (
        0.5,
        0.9,
        7,
        5,
    )
    assert asked(agent)[0].startswith("be brief")


class HermesToy(ToyTokenizer):
    """The toy's tokenizer with a template that teaches calls."""

    def chat_template(self, *, tools: bool = False) -> Any:
        found = super().chat_template(tools=tools)
        assert found is not None
        teaching = "{% for t in tools or [] %}<tool_call>{% endfor %}"
        return type(found)("{% for m in messages %}{{ m.content }} {% endfor %}" + teaching)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_has_no_sideways_scrolling(scheme: str) -> None:
    wide = (
        "x" * 300
        + "\n\n```\n"
        + "y" * 300
        + "\n```\n\n|"
        + "a" * 90
        + "|"
        + "b" * 90
        + "|\n|-|-|\n|1|2|\n"
    )
    agent = ScriptedAgent([wide], origins=ORIGINS)
    async with over_script(agent) as live, open_browser() as browser:
        page = await browser.open(page_of(live), width=390, color_scheme=scheme)
        await page.wait_for_selector("html[data-ready]", state="attached")
        await send(page, "z" * 200)
        await is_idle(page)
        for opener in (None, "#open-settings", "#close-settings", "#open-side"):
            if opener is not None:
                await page.click(opener)
            width = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
            assert await page.evaluate(width) <= 390, opener
        assert await page.evaluate("document.querySelector('#log').scrollWidth") <= 390
        paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[scheme]
        assert browser.said == []


async def test_a_page_goes_on_over_a_restart() -> None:
    """The endpoint stops in the middle of an answer and comes back at the same port."""
    gate = Gate(2)
    first, second = ScriptedAgent(PIECES, between=gate), ScriptedAgent(PIECES)
    with listen("127.0.0.1", 0) as listeners:
        port = listeners[0].getsockname()[1]
        server = scripted_server(first, listeners)
        await server.start()
        async with open_browser() as browser:
            page = await browser.open(f"http://127.0.0.1:{port}/")
            await send(page, "hello")
            await gate.reached.wait()
            await shows(page, ".assistant", "The quick")
            await server.stop(0.0)
            await page.wait_for_selector("html[data-state=waiting]", state="attached")
            await page.wait_for_selector("#notice:not(:empty)")
            assert "The quick" in await page.inner_text("#messages")
            with listen("127.0.0.1", port) as again:
                server = scripted_server(second, again)
                await server.start()
                try:
                    await shows(page, ".assistant", "jumps.")
                    await is_idle(page)
                    assert await page.locator(".message").count() == 2
                finally:
                    await server.stop(0.0)
    assert first.samplings[0].seed == second.samplings[0].seed
    assert asked(second) == ["hello"]


def scripted_server(agent: Any, listeners: Any) -> EndpointServer:
    settings = EndpointSection()
    endpoint = Endpoint(agent, ToyTokenizer(), VerifierMonitor({}), settings)
    return EndpointServer(endpoint, build_app(endpoint), listeners, settings)


async def test_another_models_answer_has_a_banner() -> None:
    """The endpoint answers by its draft model, because its verifier is away."""
    async with over_fallback() as (live, _), open_browser() as browser:
        page = await browser.open(page_of(live))
        await page.wait_for_selector("html[data-ready]", state="attached")
        assert await page.inner_text("#state") == "no verifier yet"
        await page.click("#open-settings")
        await page.fill("#max_tokens", "12")
        await send(page, "hello")
        await is_idle(page)
        banner = await page.inner_text(".banner")
        assert banner.startswith("This answer was written by draft toy, because no verifier")
        assert "not the text of the target" in banner
        assert await page.locator(".assistant .t").count() == 0
        assert "LOSSY" not in await page.inner_text(".assistant")
        assert browser.said == []


async def test_a_refused_request_shows_why() -> None:
    async with over_script(ScriptedAgent()) as live, open_browser() as browser:
        page = await browser.open(page_of(live))
        await page.wait_for_selector("html[data-ready]", state="attached")
        await page.click("#open-settings")
        await page.fill("#temperature", "-3")
        await send(page, "hello")
        await shows(page, ".failed", "temperature")
    assert [one for one in browser.said if "400" not in one] == []


async def test_a_hidden_status_page_asks_nothing() -> None:
    async with over_toy(shows_status=True) as live, open_browser() as browser:
        page = await browser.open("about:blank")
        asked_paths: list[str] = []
        page.on("request", lambda one: asked_paths.append(one.url))
        await page.clock.install()
        await page.goto(page_of(live) + "status")
        await page.wait_for_selector("#base:not(:empty)")
        hide = (
            "value => Object.defineProperty(document, 'hidden',"
            " {get: () => value, configurable: true})"
        )
        await page.evaluate(hide, True)
        await page.clock.run_for(2_000)
        before = len(asked_paths)
        await page.clock.run_for(60_000)
        assert len(asked_paths) == before
        await page.evaluate(hide, False)
        async with page.expect_request("**/status.json*"):
            await page.clock.run_for(10_000)
        assert browser.said == []


async def test_twenty_pages_on_one_endpoint() -> None:
    gate = Gate(2)
    agent = ScriptedAgent(PIECES, origins=ORIGINS, between=gate)
    settings = EndpointSection(max_concurrent=32)
    async with over_script(agent, settings=settings) as live, open_browser() as browser:
        pages = [await browser.open(page_of(live)) for _ in range(20)]
        for place, page in enumerate(pages):
            await send(page, f"question {place}")
        for page in pages:
            await shows(page, ".assistant", "The quick")
        gate.opened.set()
        for page in pages:
            await is_idle(page)
            assert "jumps." in await page.inner_text(".assistant")
        assert browser.said == []
    assert sorted(asked(agent)) == sorted(f"question {place}" for place in range(20))


async def test_the_status_page_helps_its_user() -> None:
    async with over_toy(shows_status=True) as live, open_browser() as browser:
        page = await browser.open(page_of(live) + "status")
        await page.wait_for_selector("#base:not(:empty)")
        assert await page.inner_text("#base") == f"http://127.0.0.1:{live.port}/v1"
        assert "toy (context 4,096)" in await page.inner_text("#models")
        answer = await page.evaluate(
            "fetch('v1/completions', {method: 'POST', body:"
            ' \'{"prompt": "a", "max_tokens": true}\'}).then(one => one.status)'
        )
        assert answer == 400
        await page.wait_for_selector("#failures li")
        shown = await page.inner_text("#failures")
        assert "/v1/completions" in shown
        assert "max_tokens" in shown
        await page.click("text=Chat")
        await page.wait_for_selector("html[data-ready]", state="attached")
        await page.click("text=Status and addresses")
        await page.wait_for_selector("#base:not(:empty)")
    assert [one for one in browser.said if "400" not in one] == []


async def test_the_status_page_asks_for_the_key_without_a_refused_request() -> None:
    async with over_toy(shows_status=True, key="secret") as live, open_browser() as browser:
        page = await browser.open(page_of(live) + "status")
        await page.fill("#key", "wrong")
        await page.keyboard.press("Enter")
        await shows(page, "#trouble", "not the API key")
        assert not await page.is_visible("#numbers")
        await page.fill("#key", "secret")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#base:not(:empty)")
        assert browser.said == []
        assert live.endpoint.failures.latest == []

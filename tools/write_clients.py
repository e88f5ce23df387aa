"""Write ``docs/clients.md``, the page of clients, from the table in ``tests/clients``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.clients.table import WORKS, Client, Kind, Results, read_results, read_table

PAGE: Final = Path(__file__).parents[1] / "docs" / "clients.md"
_HEAD: Final = """# Clients

Programs and libraries that run against `edgespec serve` unchanged: the lines that point each of
them at the endpoint, and what was seen. The page is written by `python -m tools.write_clients` from
`tests/clients/clients.yaml` and the record of the last `make clients`.
[The endpoint](endpoint/README.md) has the APIs and their parameters.

A client that is not here usually has a field for an *OpenAI-compatible* base URL. Give it
`http://127.0.0.1:7421/v1`, any key, and the model `edgespec`. Where it wants Anthropic's or
Ollama's address, leave out `/v1`.

## What was run

`make clients` installs each client at exactly the version below, in an environment of its own, and
runs it against two endpoints:

* **A scripted target** follows instructions in the messages. It shows whether the client gets what
  it needs: plain text, streams, calls of tools that the client runs with a second turn, JSON of a
  schema, thoughts. Agents do a task of three calls of their own shell tool, one after another.
* **SmolLM2 135M** shows that a real model works behind the same door, in plain text, streams and
  JSON. It is too small to call tools, and its context of 8,192 tokens is too short for agents.

"5 of 5" counts the parts of a client's driver that showed what they must.

| client | version | scripted target | SmolLM2 |
| --- | --- | --- | --- |
"""
_TITLES: Final[Mapping[Kind, str]] = {
    Kind.LIBRARY: "Libraries",
    Kind.FRAMEWORK: "Frameworks",
    Kind.AGENT: "Agents for the terminal",
    Kind.PROGRAM: "Programs",
    Kind.PAGE: "Pages",
}
_NO_RESULTS: Final = Results((), {})


def page() -> str:
    """Return the page as Markdown."""
    table, results = read_table(), read_results()
    rows = [_row(one, results.get(name, _NO_RESULTS)) for name, one in table.items()]
    parts = [_HEAD + "\n".join(rows) + "\n"]
    for kind, title in _TITLES.items():
        parts.append(f"## {title}\n")
        for name, client in table.items():
            if client.kind is kind:
                parts.append("\n".join(_section(client, results.get(name, _NO_RESULTS))))
    return "\n".join(parts)


def _row(client: Client, results: Results) -> str:
    if client.not_run:
        return f"| {client.title} | {client.version} | not run | not run |"
    counts = [_count(results.targets.get(one, {})) for one in ("scripted", "smollm2")]
    return f"| {client.title} | {client.version} | {' | '.join(counts)} |"


def _count(found: Mapping[str, str]) -> str:
    if not found:
        return "not run"
    return f"{sum(one == WORKS for one in found.values())} of {len(found)}"


def _section(client: Client, results: Results) -> Iterator[str]:
    yield f"### {client.title}\n"
    yield f"```{client.language}\n{client.configure.rstrip()}\n```\n"
    scripted = results.targets.get("scripted", {})
    if works := [_words(part) for part, one in scripted.items() if one == WORKS]:
        yield f"* Works: {', '.join(works)}."
    for target, found in results.targets.items():
        for part, why in found.items():
            if why != WORKS:
                yield f"* Fails with the {target} target: {_words(part)} ({_plain(why)})."
    if client.not_run:
        yield f"* Not run by `make clients`. {client.not_run}"
    elif not scripted:
        yield "* Not run yet."
    if client.remark:
        yield f"* {client.remark}"
    yield ""


def _words(part: str) -> str:
    """Return the name of a part in words."""
    known = {
        "plain": "plain text",
        "stream": "streams",
        "structured": "JSON of a schema",
        "task": "a task of three calls",
    }
    return known.get(part, part.replace("_", " "))


def _plain(text: str) -> str:
    """Return a text without what Markdown would interpret."""
    return text.replace("`", "'").replace("|", "/").replace("<", "&lt;").replace("*", "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

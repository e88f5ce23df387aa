"""A target model that follows a few instructions, so that a client can be judged without a real
model: it calls the tools that a client offers, one after another, and then answers in text.

It is a whole verifier: tokens come over gRPC, drafts are judged, and grammars constrain its output.
Its tokenizer has one token for each byte, and its chat template writes the conversation as JSON.
The model reads that JSON back and looks for an instruction in the messages of the user:

    Call NAME with {...}.        calls the tool NAME, and then quotes its result
    Run these commands: `...`.   calls the client's own shell tool once for each command
    In FILE replace "A" by "B".  writes an edit as aider's models do
    Think first.                 writes a thought in front of the answer
    anything else                "The capital of France is Paris."

If a constraint forbids what the instruction leads to, the model writes JSON that fits the schema,
or calls another tool that is offered, and if all that is forbidden, the shortest text that is
allowed.

``python -m tests.clients.scripted_model`` serves it until Ctrl-C. An argument names a folder with
its texts (``write_model``).
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgespec.config import VerifierConfig
from edgespec.core.ports import ModelInfo, PassRequest, PassResult, SimpleTarget
from edgespec.core.protocol import work
from edgespec.core.protocol.constraint import Constraint, ConstraintKind, allows
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models import folders
from edgespec.verifier.build import build_verifier
from edgespec.verifier.targets.pass_requests import (
    ConstrainedRows,
    SequenceText,
    check_batch,
    check_opening,
)

NAME: Final = "scripted"
CONTEXT_LENGTH: Final = 1 << 18
"""Room for the prompts of agents, which are 80,000 bytes and more."""
ANSWER: Final = "The capital of France is Paris."
THOUGHT: Final = "Paris is in France."
RESULT: Final = "The tool returned: "
"""Beginning of the answer behind the last call."""

# Added tokens. The marks of calls and thoughts are not special, as in the tokenizers of Qwen.
_BEGIN, _ASSISTANT, _END = "<|conversation|>", "<|assistant|>", "<|end|>"
_SPECIAL: Final = (_BEGIN, _ASSISTANT, _END)
_MARKS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_BYTES: Final = 256
TOKEN_IDS: Final[Mapping[str, int]] = {
    text: _BYTES + place for place, text in enumerate((*_SPECIAL, *_MARKS))
}
_END_ID: Final = TOKEN_IDS[_END]
_VOCABULARY_SIZE: Final = _BYTES + len(TOKEN_IDS)

# The comment has the marks by which the formats of calls and thoughts are known.
TEMPLATE: Final = (
    "{#- Calls: <tool_call></tool_call>. Thoughts: <think></think>. -#}"
    f"{_BEGIN}"
    "{{- {'tools': tools or [], 'messages': messages} | tojson -}}"
    f"{{% if add_generation_prompt %}}{_ASSISTANT}{{% endif %}}"
)


# --- texts and tokens -----------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary, as GPT-2 has it."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(_BYTES) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(_BYTES + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(_BYTES)]


def write_model(folder: Path) -> Path:
    """Write the texts of the model (tokenizer, template, configuration) into ``folder``."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in _MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "vocab_size": _VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "eos_token_id": _END_ID,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def encode(text: str) -> list[int]:
    """Return the tokens of a text, with marks as their own tokens."""
    parts = re.split("(" + "|".join(map(re.escape, TOKEN_IDS)) + ")", text)
    return [
        token
        for part in parts
        for token in ([TOKEN_IDS[part]] if part in TOKEN_IDS else part.encode())
    ]


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens, without the added ones."""
    return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")


# --- what the model writes ------------------------------------------------------------------------


_CALL: Final = re.compile(r"Call ([\w.:/-]+) with (?=\{)")
_COMMANDS: Final = re.compile(r"Run these commands:((?:,? `[^`]+`)+)")
_EDIT: Final = re.compile(r'In ([\w./-]+) replace "([^"\n]*)" by "([^"\n]*)"')
_THINK: Final = "Think first."
_SECTIONS: Final = re.compile(r"Respond with .*?\[\[ ## completed ## \]\]", re.DOTALL)
"""The request for an output in dspy's own notation."""
_SECTION: Final = re.compile(r"\[\[ ## (\w+) ## \]\]")
_SHELL_ARGUMENTS: Final = ("command", "cmd", "commands")
_MOST_RESULT: Final = 200
"""Characters of a tool's result that are quoted."""
_MOST_DEPTH: Final = 16


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as the template wrote it, with the instruction that counts in it."""

    tools: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]

    @classmethod
    def parse(cls, prompt: Sequence[int]) -> Conversation | None:
        """Return the conversation of a prompt; None if the prompt is a plain text."""
        begin, end = TOKEN_IDS[_BEGIN], TOKEN_IDS[_ASSISTANT]
        if not prompt or prompt[0] != begin or prompt[-1] != end:
            return None
        # Marks in the messages were read as tokens, so they are written again.
        texts = {token: text.encode() for text, token in TOKEN_IDS.items()}
        found = b"".join(texts[one] if one in texts else bytes((one,)) for one in prompt[1:-1])
        data = json.loads(found)
        tools = [tool["function"] for tool in data["tools"]]
        return cls(tools, data["messages"])

    @property
    def _instruction_place(self) -> int:
        """Index of the last message of the user that has an instruction; of his last message if
        none has one; -1 without messages of his."""
        users = [
            place for place, one in enumerate(self.messages) if one["role"] in ("user", "system")
        ]
        patterns = (_CALL, _COMMANDS, _EDIT)
        for place in reversed(users):
            if any(one.search(_content(self.messages[place])) for one in patterns):
                return place
        return users[-1] if users else -1

    @property
    def instruction(self) -> str:
        place = self._instruction_place
        return _content(self.messages[place]) if place >= 0 else ""

    @property
    def results(self) -> list[str]:
        """The results of tools behind the instruction."""
        behind = self.messages[self._instruction_place + 1 :]
        return [_content(one) for one in behind if one["role"] == "tool"]

    @property
    def called(self) -> set[str]:
        """Names of the tools that were called behind the instruction."""
        behind = self.messages[self._instruction_place + 1 :]
        calls = [call for one in behind for call in one.get("tool_calls") or ()]
        return {str(call["function"]["name"]) for call in calls}


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def candidate_texts(talk: Conversation | None, constraint: str) -> Iterator[str]:
    """Yield what the model may write, best first. ``constraint`` is the text of the constraint, or
    empty."""
    if talk is None:
        yield f" {ANSWER}"
        return
    thought = f"<think>\n{THOUGHT}\n</think>\n\n" if _THINK in talk.instruction else ""
    yield thought + write_reply(talk)
    for schema in schemas_in(constraint):
        yield thought + json.dumps(instance_of(schema))
    for is_new in (True, False):
        for tool in talk.tools:
            if (tool["name"] not in talk.called) is is_new:
                arguments = instance_of(tool.get("parameters") or {})
                yield thought + write_call(tool["name"], arguments)
    yield thought


def write_reply(talk: Conversation) -> str:
    """Return what the instruction leads to."""
    instruction, step = talk.instruction, len(talk.results)
    calls = [
        (found[1], arguments)
        for found in _CALL.finditer(instruction)
        if isinstance(arguments := _json_at(instruction, found.end()), dict)
    ]
    if (commands := _COMMANDS.search(instruction)) and (shell := _find_shell(talk.tools)):
        listed = re.findall("`([^`]+)`", commands[1])
        calls = [(shell["name"], _shell_arguments(shell, command)) for command in listed]
    if talk.tools and step < len(calls):
        return write_call(*calls[step])
    if step:
        return RESULT + talk.results[-1].strip()[-_MOST_RESULT:]
    if edit := _EDIT.search(instruction):
        file, old, new = edit.groups()
        return f"{file}\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n"
    if sections := _SECTIONS.search(instruction):
        names = dict.fromkeys(_SECTION.findall(sections[0]))
        written = [f"[[ ## {name} ## ]]\n{ANSWER}" for name in names if name != "completed"]
        return "\n\n".join([*written, "[[ ## completed ## ]]"])
    return ANSWER


def write_call(name: str, arguments: Any) -> str:
    """Return a call in the format of Hermes."""
    call = f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{call}\n</tool_call>"


def _json_at(text: str, place: int) -> Any:
    """Return the JSON value that begins at ``place``; None if there is none, as where a client
    quotes an instruction."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text, place)
    except ValueError:
        return None
    return found


def _find_shell(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the first tool that takes a command."""
    return next(
        (one for one in tools if any(a in _properties(one) for a in _SHELL_ARGUMENTS)), None
    )


def _shell_arguments(shell: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return the arguments with which a shell tool runs ``command``."""
    known = _properties(shell)
    key = next(one for one in _SHELL_ARGUMENTS if one in known)
    written: Any = command
    if key == "commands":
        written = [command]
    elif known[key].get("type") == "array":
        written = ["bash", "-c", command]
    required = (shell.get("parameters") or {}).get("required") or ()
    others = {one: instance_of(known[one]) for one in required if one in known and one != key}
    return {key: written, **others}


def _properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (tool.get("parameters") or {}).get("properties") or {}
    return found


def schemas_in(constraint: str) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON schemas in the text of a constraint: the whole text, or behind ``%json``."""
    starts = [found.end() for found in re.finditer(r"%json\s*(?=\{)", constraint)]
    for start in starts or ([0] if constraint.startswith("{") else []):
        if isinstance(found := _json_at(constraint, start), dict):
            yield found


def instance_of(schema: Mapping[str, Any]) -> Any:
    """Return a small value that fits a JSON schema, as far as clients use the notation."""
    return _instance(schema, schema, "", 0)


def _instance(schema: Any, root: Mapping[str, Any], name: str, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MOST_DEPTH:
        return None
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if reference := schema.get("$ref"):
        found: Any = root
        for part in str(reference).removeprefix("#/").split("/"):
            found = found.get(part, {})
        return _instance(found, root, name, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _instance(schema[key][0], root, name, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            properties = schema.get("properties") or {}
            return {key: _instance(one, root, key, depth + 1) for key, one in properties.items()}
        case "array":
            count = max(1, int(schema.get("minItems", 1)))
            return [_instance(schema.get("items", {}), root, name, depth + 1)] * count
        case "integer":
            return int(schema.get("minimum", 1))
        case "number":
            return float(schema.get("minimum", 1.0))
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "France" if name == "country" else "Paris"


# --- the target -----------------------------------------------------------------------------------


_CHEAPEST: Final = [
    _END_ID,
    *b'"}]',
    *(TOKEN_IDS[one] for one in ("</think>", "</tool_call>")),
    *b"1aA,:{[t",
]
"""Tokens in the order in which they end a constrained output soonest."""
_ORDER: Final = [*_CHEAPEST, *(t for t in range(_VOCABULARY_SIZE) if t not in _CHEAPEST)]
_PREFERRED: Final = 30.0
"""Logit of the token that comes next; the others have small ones."""


class _Script:
    """One output, from the prompt and its constraint."""

    def __init__(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        constraint = sampling.constraint
        text = (
            ""
            if constraint is None or constraint.kind is ConstraintKind.TOKENS
            else (constraint.text)
        )
        texts = candidate_texts(Conversation.parse(prompt), text)
        every = (encode(one) for one in texts)
        self.tokens = next((one for one in every if _fits(constraint, one)), [])

    def next_token(self, output: Sequence[int], mask: bytes | None) -> int:
        """Return the token behind ``output``."""
        place = len(output)
        wanted = _END_ID
        if list(output) == self.tokens[:place] and place < len(self.tokens):
            wanted = self.tokens[place]
        if mask is None or allows(mask, wanted):
            return wanted
        return next((token for token in _ORDER if allows(mask, token)), _END_ID)


def _fits(constraint: Constraint | None, tokens: Sequence[int]) -> bool:
    if constraint is None:
        return True
    assert constraint.matcher is not None, "the verifier reads a constraint before it opens"
    matcher = constraint.matcher()
    return matcher.consume(tokens) == len(tokens) and matcher.can_end


class ScriptedTarget(SimpleTarget):
    """A ``ports.TargetModel`` that writes what its prompt leads to.

    Args:
        vocabulary: Fingerprint of the tokenizer's vocabulary.
    """

    mode = "scripted"
    cache = None

    def __init__(self, vocabulary: str) -> None:
        self.info = ModelInfo(
            NAME, vocabulary, _VOCABULARY_SIZE, CONTEXT_LENGTH, (_END_ID,), f"{NAME}-1"
        )
        self._sequences: dict[str, SequenceText] = {}
        self._scripts: dict[str, _Script] = {}
        self._constrained = ConstrainedRows(self.info)

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        check_opening(key, prompt_length, self._sequences, 1024, self.info)
        self._constrained.open(key, sampling)
        self._sequences[key] = SequenceText(prompt_length, sampling, text)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        check_batch(batch, lambda request: self._sequences[request.key].reach(request), self.info)
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._sequences[key].keep(key, nodes)

    def close(self, key: str) -> None:
        self._sequences.pop(key, None)
        self._scripts.pop(key, None)
        self._constrained.close(key)

    def _run(self, request: PassRequest) -> PassResult:
        sequence = self._sequences[request.key]
        sequence.cut(request.cache_length)
        sequence.tokens.extend(request.feed)
        sequence.nodes, sequence.parents = request.tokens, request.parents
        if not request.sample:
            return PassResult(request.key, ())
        if (script := self._scripts.get(request.key)) is None:
            prompt = sequence.tokens[: sequence.prompt_length]
            script = self._scripts[request.key] = _Script(prompt, sequence.sampling)
        output = sequence.tokens[sequence.prompt_length :]
        paths = [output]
        for token, parent in zip(request.tokens, request.parents, strict=True):
            paths.append([*paths[1 + parent], token])
        masks = self._constrained.masks(request.key, sequence, request.tokens, request.parents)
        targets = [script.next_token(path, mask) for path, mask in zip(paths, masks, strict=True)]
        scores: tuple[work.TokenScore, ...] = ()
        if request.logprobs:
            scores = tuple(work.score_token(_row(t), t, request.logprobs) for t in targets)
        return PassResult(request.key, tuple(targets), scores)


def _row(token: int) -> list[float]:
    """Return logits among which ``token`` leads."""
    row = [-0.01 * place for place in range(_VOCABULARY_SIZE)]
    row[token] = _PREFERRED
    return row


# --- a verifier of its own ------------------------------------------------------------------------


async def serve(folder: Path, port: int) -> None:
    """Serve the model whose texts are in ``folder`` until SIGINT or SIGTERM."""
    vocabulary = folders.vocabulary_fingerprint(folder / "tokenizer.json")
    config = VerifierConfig(model=str(folder), name=NAME, port=port)
    verifier, server = build_verifier(config, target=ScriptedTarget(vocabulary))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    sys.stdout.write(f"verifier ready on 127.0.0.1:{server.port}: {NAME}\n")
    sys.stdout.flush()
    await stop.wait()
    await verifier.stop()
    await server.stop(0.0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(serve(Path(sys.argv[1]), 0))
    else:
        with tempfile.TemporaryDirectory() as made:
            asyncio.run(serve(write_model(Path(made)), 0))

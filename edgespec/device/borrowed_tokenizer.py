"""A device without a draft model has no tokenizer of its own: it takes the verifier's.

What comes is bounded and checked against its announced SHA-256, has to be readable, and has to have
the vocabulary that the verifier serves; only then it is put into the user's cache, under the hash
of its files. One that lies there is checked again before it is used.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from edgespec.config import AgentConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.build import (
    BUNDLED,
    LOOKUP,
    NONE,
    add_corpus,
    agent_options,
    ask_verifiers,
    dial,
    load_drafter,
    load_tokenizer,
    tokenizer_reference,
    verifier_transport,
    vocabulary_of,
    with_port,
)
from edgespec.device.prober import Answer
from edgespec.models.folders import cache_folder, vocabulary_fingerprint
from edgespec.models.grammar import device_reader
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.toy import TOY
from edgespec.telemetry.trace import Tracer
from edgespec.wire.access import device_access
from edgespec.wire.tokenizer_lending import TextFile, TokenizerFetch, are_as_announced, cache_key

Say = Callable[[str], None]

_FOLDER = "tokenizers"


def borrows_tokenizer(config: AgentConfig) -> bool:
    """Whether nothing in ``config`` names a tokenizer, so that the verifier's is used."""
    return not config.tokenizer and config.draft.model in (NONE, LOOKUP)


async def with_tokenizer(config: AgentConfig, info: ModelInfo, say: Say) -> AgentConfig:
    """``config``, with the tokenizer of its first verifier, which serves ``info``, where it has
    none of its own. A verifier that sends none, but has the vocabulary of a model that comes with
    edgespec, is met with that one's. Raises ``SetupError`` saying what to give."""
    if not borrows_tokenizer(config):
        return config
    try:
        return await with_lent_tokenizer(config, info, say, config.verifiers[0])
    except LinkError as error:
        raise _none_lent(error) from error


async def with_lent_tokenizer(
    config: AgentConfig, info: ModelInfo, say: Say, address: str
) -> AgentConfig:
    """As ``with_tokenizer``, for who may ask again: raises ``LinkError`` where the link was lost,
    and ``SetupError`` where this verifier will never lend one."""
    address = with_port(address)
    transport = dial(address, device_access(config))
    try:
        fetch = TokenizerFetch(transport.ask_tokenizer, address)
        folder = await _cached(fetch, info, say)
    except LinkError as error:
        own = _of_this_package(info)
        if own is not None:
            return replace(config, tokenizer=own)
        if error.retryable:
            raise
        raise _none_lent(error) from error
    finally:
        await transport.close()
    return replace(config, tokenizer=str(folder))


def _none_lent(error: LinkError) -> SetupError:
    return SetupError(f"{error}\n  name a folder or Hub id that has it: --set tokenizer=NAME")


async def _cached(fetch: TokenizerFetch, info: ModelInfo, say: Say) -> Path:
    """The folder of the verifier's tokenizer. Raises ``LinkError``, also for one of no use."""
    entries = await fetch.entries()
    folder = cache_folder() / _FOLDER / cache_key(entries)
    if await asyncio.to_thread(_is_whole, folder, entries):
        return folder
    size = sum(entry.size for entry in entries)
    sent = sum(entry.packed_size for entry in entries)
    packed = f"{size / 1e3:,.0f} kB, {sent / 1e3:,.0f} kB packed"
    say(f"fetching the tokenizer of {info.name} from the verifier, once: {packed}")
    contents = {entry.name: await fetch.content(entry) for entry in entries}
    await asyncio.to_thread(_place, folder, entries, contents, info)
    return folder


def _is_whole(folder: Path, entries: Sequence[TextFile]) -> bool:
    try:
        contents = {entry.name: (folder / entry.name).read_bytes() for entry in entries}
    except OSError:
        return False
    return are_as_announced(entries, contents)


def _place(
    folder: Path, entries: Sequence[TextFile], contents: Mapping[str, bytes], info: ModelInfo
) -> None:
    """Write the files beside ``folder``, try them, and move them there, unless another process was
    faster: that reads them by now. Raises ``LinkError`` for a tokenizer that cannot be used,
    ``SetupError`` where nothing can be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    except OSError as error:
        raise SetupError(f"the verifier's tokenizer cannot be kept: {error}") from error
    try:
        for name, content in contents.items():
            path = work / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        _try(work, info)
        if _is_whole(folder, entries):
            return
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as error:
        if isinstance(error, LinkError):
            raise
        raise SetupError(f"the verifier's tokenizer cannot be kept: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _try(folder: Path, info: ModelInfo) -> None:
    """Raises ``LinkError`` where the files are no tokenizer of ``info``."""
    who = f"the tokenizer that the verifier of {info.name!r} sent"
    try:
        found = vocabulary_fingerprint(folder / "tokenizer.json")
        text = TextTokenizer(folder)
        text.chat_template()
    except ValueError as error:
        why = str(error).replace(f"{folder}/", "")
        raise LinkError(f"{who} cannot be used: {why}", retryable=False) from error
    if found != info.vocabulary:
        raise LinkError(
            f"{who} has the vocabulary {found}, but it serves {info.vocabulary}", retryable=False
        )


def _of_this_package(info: ModelInfo) -> str | None:
    own = (BUNDLED, TOY)
    return next((one for one in own if vocabulary_of(one) == info.vocabulary), None)


class BorrowingAgent(Agent):
    """For a ``config`` that names no tokenizer (``borrows_tokenizer``). It is asked for before the
    first text, and again before the next one while nobody lends."""

    def __init__(
        self, config: AgentConfig, *, tracer: Tracer | None = None, say: Say | None = None
    ) -> None:
        options = agent_options(config, "")
        super().__init__(
            verifier_transport(config), None, _no_text, _no_text, options, tracer=tracer
        )
        self.lent: AgentConfig | None = None
        """The configuration with the tokenizer that was lent; None: none was yet."""
        self._config, self._say = config, say or (lambda text: None)
        self._one_at_a_time = asyncio.Lock()

    async def borrow(self) -> AgentConfig:
        """Ask all verifiers once, and take the tokenizer of the first of them that fits. Raises
        ``LinkError`` where nobody answers who may do so later, ``SetupError`` where nobody will."""
        async with self._one_at_a_time:
            if self.lent is None:
                address, info = await self._first_answer()
                config = await with_lent_tokenizer(self._config, info, self._say, address)
                await asyncio.to_thread(self._take, config)
                self.lent = config
            return self.lent

    def _take(self, config: AgentConfig) -> None:
        """From here on this is an agent as ``build_agent`` makes it. Raises ``SetupError``."""
        try:
            text = load_tokenizer(reference := tokenizer_reference(config))
            vocabulary, drafter = vocabulary_of(reference), load_drafter(config, say=self._say)
            add_corpus(self.options.text, config, text, self._say)
        except ValueError as error:
            raise SetupError(str(error)) from error
        self.options = replace(self.options, vocabulary=vocabulary)
        self._vocabulary, self.drafter = vocabulary, drafter
        self._encode, self._decoder = text.encode, text.stream
        self._read_constraint = device_reader(reference)

    async def _ready(self) -> None:
        """A verifier is waited for as long as a first stream is."""
        policy = self.options.reconnect
        until, pause_s = time.monotonic() + policy.give_up_first_s, policy.first_s
        while self.lent is None:
            try:
                await self.borrow()
            except SetupError as error:
                raise GenerationError(str(error), None) from error
            except LinkError as error:
                if not error.retryable or time.monotonic() + pause_s > until:
                    raise GenerationError(f"gave up on the verifier: {error}", None) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, policy.longest_s)

    async def _first_answer(self) -> tuple[str, ModelInfo]:
        answers, wanted = await ask_verifiers(self._config), self._config.model
        for address, answer in answers.items():
            if answer.info is not None and (model := answer.info.of(wanted)) is not None:
                return address, model
        _refuse(answers, wanted)


def _refuse(answers: Mapping[str, Answer], wanted: str) -> NoReturn:
    why = [
        answer.why
        if answer.info is None
        else f"{address} serves {', '.join(repr(one.name) for one in answer.info.served)},"
        f" not {wanted!r}"
        for address, answer in answers.items()
    ]
    if any(answer.error is not None and answer.error.retryable for answer in answers.values()):
        raise LinkError("; ".join(why))
    raise SetupError("\n".join(why))


def _no_text(*_: object) -> NoReturn:
    raise RuntimeError("no tokenizer was lent yet")

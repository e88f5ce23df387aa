"""Texts of the target that a device borrows from its verifier.

They are the tokenizer, the special tokens, the chat template and the sampling defaults. With them a
request has the same answer whatever draft the device has.

The files are bounded, checked against their announced SHA-256, read, and compared with the
vocabulary that the verifier serves. Only then they are stored in the user's cache, under their
hash. A tokenizer of a stranger is a program, so it is read and runs in a bounded process
(``RemoteTokenizer``). A ``tokenizer.json`` that the draft already has, byte for byte, is not
fetched. An older verifier sends only a tokenizer, for a device that has none. In other cases the
draft's texts are used then, and the user is informed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from edgespec.config import AgentConfig
from edgespec.config.common import SetupError
from edgespec.config.files import temporary_folder
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.errors import ConnectError, EdgespecError, GenerationError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import build
from edgespec.device.agent import Agent, Chunk
from edgespec.device.connections import Connections, borrows_tokenizer
from edgespec.device.remembered_verifiers import Greeting
from edgespec.models.folders import read_generation_sampling
from edgespec.models.grammar import device_grammar_reader
from edgespec.models.lent_texts import lent_folders, make_process_folder
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.toy import TOY
from edgespec.operating_system import move_path
from edgespec.telemetry.trace import Tracer
from edgespec.wire.tokenizer_lending import (
    TOKENIZER_JSON,
    Announcement,
    TokenizerFetch,
    gather_calls,
)
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

logger = logging.getLogger(__name__)

_NAME_DIGITS = 32
_WORKERS = WorkerPool("preparing a tokenizer", threads=2, max_waiting=64, timeout_s=300.0)


def takes_target_texts(config: AgentConfig) -> bool:
    """Return whether the texts of the target come from the verifier.

    They do if the user names no tokenizer and the draft is none of the toys."""
    return not config.tokenizer and config.draft.model not in (TOY, build.RANDOM)


async def with_tokenizer(
    config: AgentConfig,
    info: ModelInfo,
    say: build.Say,
    address: str = "",
    connections: Connections | None = None,
) -> AgentConfig:
    """Return ``config`` with the texts of the target ``info`` in place of a tokenizer.

    If the verifier sends no texts, a model that comes with edgespec is used if its vocabulary is
    the same. Otherwise the draft's texts are used, and ``say`` is called with a line about it.

    Args:
        config: The configuration of the device.
        info: The model that the verifier serves.
        say: Called with lines for the user.
        address: Address of that verifier, by default the first one of ``config``.
        connections: The connections to use. None opens one for this call.

    Raises:
        LinkError: The link was lost.
        SetupError: A device without a tokenizer cannot get one, or the files are of no use.
    """
    if not takes_target_texts(config):
        return config
    address = build.with_port(address or config.verifiers[0])
    if connections is None:
        async with Connections(config, with_texts=True) as own:
            return await with_tokenizer(config, info, say, address, own)
    try:
        greeting = await connections.greet(address)
        if (announced := greeting.announced) is None:
            if borrows_tokenizer(config):
                raise LinkError(greeting.refusal, retryable=False)
            return _keep_own_texts(config, info, say, greeting.refusal)
        if announced.facts is None and not borrows_tokenizer(config):
            return _keep_own_texts(config, info, say, "it is an older one")
        link = connections.lease(address)
        try:
            fetch = connections.tokenizer_fetch(address)
            folder = await _fetch_texts(fetch, announced, info, say, config)
        finally:
            await link.close()
        return replace(config, tokenizer=str(folder))
    except LinkError as error:
        for own_model in (build.BUNDLED, TOY) if borrows_tokenizer(config) else ():
            if build.vocabulary_of(own_model) == info.vocabulary:
                return replace(config, tokenizer=own_model)
        if error.retryable:
            raise
        advice = "name a folder or Hub id that has it: --set tokenizer=NAME"
        raise SetupError(f"{error}\n  {advice}") from error


@dataclass(frozen=True, slots=True)
class RecalledTarget:
    """The answer of a verifier to an earlier process, and the configuration that fits it."""

    config: AgentConfig
    info: ModelInfo
    greetings: Mapping[str, Greeting]
    """The earlier answers, by address."""

    async def is_current(self, connections: Connections) -> bool:
        """Return whether the verifier that answers first gives the answer that is remembered, or
        one that fits as well. False if none answers."""
        if (found := await connections.first_answer()) is None:
            return False
        address, greeting = found
        if (known := self.greetings.get(address)) is not None:
            return greeting.is_same_as(known)
        # Another verifier has the same texts if it lends the same files.
        others = [known.announced for known in self.greetings.values()]
        return greeting.info.find_model(self.config.model) == self.info and (
            greeting.announced in others
        )


def recall_target(
    config: AgentConfig, connections: Connections, say: build.Say
) -> RecalledTarget | None:
    """Return what the verifiers of ``config`` answered to an earlier process, if everything that
    this device needs of it is in the cache, else None. Nothing is sent.

    Nothing must be shown that depends on it before ``RecalledTarget.is_current`` is true."""
    greetings = {one: connections.recall(one) for one in connections.addresses}
    known = {address: one for address, one in greetings.items() if one is not None}
    for greeting in known.values():
        if (info := greeting.info.find_model(config.model)) is None:
            continue
        try:
            found = build.with_pulled_draft(config, info, say)
            if takes_target_texts(found):
                if (folder := _find_texts(greeting.announced, config)) is None:
                    continue
                found = replace(found, tokenizer=str(folder))
            build.check_draft(found, info)
        except (SetupError, ValueError):  # The real answer leads to the message.
            continue
        return RecalledTarget(found, info, known)
    return None


def _find_texts(announced: Announcement | None, config: AgentConfig) -> Path | None:
    """Return the folder of the texts that were fetched before, or None."""
    if announced is None or (announced.facts is None and not borrows_tokenizer(config)):
        return None
    name = _name_texts(announced)
    folders = (parent / name for parent in lent_folders())
    return next((one for one in folders if (one / TOKENIZER_JSON).is_file()), None)


def _name_texts(announced: Announcement) -> str:
    """Return the name of the folder of announced texts."""
    key = announced.sha256
    if announced.facts is not None:
        key = hashlib.sha256(announced.tokenizer_sha256 + announced.facts.sha256).digest()
    return key.hex()[:_NAME_DIGITS]


def _keep_own_texts(config: AgentConfig, info: ModelInfo, say: build.Say, why: str) -> AgentConfig:
    say(
        f"chat template, special tokens and sampling defaults are those of {config.draft.model!r}:"
        f" the verifier of {info.name!r} sends none ({why})"
    )
    return replace(config, tokenizer=config.draft.model)


async def _fetch_texts(
    fetch: TokenizerFetch,
    announced: Announcement,
    info: ModelInfo,
    say: build.Say,
    config: AgentConfig,
) -> Path:
    """Return the folder of the verifier's texts, which are fetched if they are not there.

    Raises ``LinkError`` if that fails or the files are of no use."""
    if (known := _find_texts(announced, config)) is not None:
        return known
    name = _name_texts(announced)
    tokenizer = await _WORKERS.run(_read_own_tokenizer, config, announced.tokenizer_sha256)
    if tokenizer is not None:
        texts = await fetch.fetch_facts(announced)
    else:
        size = f"{announced.size / 1e3:,.0f} kB"
        say(f"fetching the tokenizer of {info.name} from the verifier, once: {size}")
        texts, whole = await gather_calls(
            (fetch.fetch_facts(announced), fetch.fetch_texts(announced))
        )
        tokenizer = whole[TOKENIZER_JSON]
        if announced.facts is None:
            texts = whole
        elif hashlib.sha256(tokenizer).digest() != announced.tokenizer_sha256:
            why = f"the tokenizer.json of {info.name!r} does not have the announced SHA-256"
            raise LinkError(why, retryable=False)
    try:
        return await _WORKERS.run(_store_texts, name, {**texts, TOKENIZER_JSON: tokenizer}, info)
    except (PoolBusyError, PoolLateError) as error:
        raise LinkError(str(error)) from None


def _read_own_tokenizer(config: AgentConfig, sha256: bytes) -> bytes | None:
    """Return the ``tokenizer.json`` of the draft if it has this SHA-256, else None."""
    if borrows_tokenizer(config):
        return None
    path = resolve_source(config.draft.model, Purpose.TEXTS).folder / TOKENIZER_JSON
    content = path.read_bytes() if path.is_file() else b""
    return content if hashlib.sha256(content).digest() == sha256 else None


def _store_texts(name: str, texts: Mapping[str, bytes], info: ModelInfo) -> Path:
    """Write the files into a folder ``name`` and return it.

    It is in the cache, or in the folder of this process if the cache cannot be written. Raises
    ``LinkError`` for a tokenizer that cannot be used, and ``SetupError`` if nothing can be
    written."""
    for parent in lent_folders():
        try:
            return _store_texts_in(parent / name, texts, info)
        except LinkError:  # This is a subclass of OSError.
            raise
        except OSError as error:
            logger.info("the verifier's tokenizer is not kept in %s: %s", parent, error)
    try:
        return _store_texts_in(make_process_folder() / name, texts, info)
    except LinkError:
        raise
    except OSError as error:
        raise SetupError(f"the verifier's tokenizer cannot be kept: {error}") from error


def _store_texts_in(folder: Path, texts: Mapping[str, bytes], info: ModelInfo) -> Path:
    """Write the files beside ``folder``, try them, and move them there.

    Files of another process that was faster stay. Raises ``LinkError`` for a tokenizer that cannot
    be used, and ``OSError``."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent, ".fetch-") as place:
            work = place / "texts"
            for name, content in texts.items():
                (path := work / name).parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            _check_texts(work, info)
            if not (folder / TOKENIZER_JSON).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                move_path(work, folder)
    except LinkError:
        raise
    except OSError:
        if not (folder / TOKENIZER_JSON).is_file():  # Otherwise another process was faster.
            raise
    return folder


def _check_texts(folder: Path, info: ModelInfo) -> None:
    """Try the files. Raises ``LinkError`` if they are no tokenizer of ``info``."""
    subject = f"the tokenizer that the verifier of {info.name!r} sent"
    try:
        tokenizer = RemoteTokenizer(folder)
        tokenizer.close()
        read_generation_sampling(folder)
    except ValueError as error:
        why = str(error).replace(f"{folder}{os.sep}", "")
        raise LinkError(f"{subject} cannot be used: {why}", retryable=False) from error
    if (vocabulary := tokenizer.vocabulary) != info.vocabulary:
        raise LinkError(
            f"{subject} has the vocabulary {vocabulary}, but it serves {info.vocabulary}",
            retryable=False,
        )


class OutdatedError(EdgespecError):
    """A verifier does not serve what it served before, so that a generation has to begin anew."""


async def confirmed_chunks(
    chunks: AsyncGenerator[Chunk, None], confirming: asyncio.Future[bool]
) -> AsyncGenerator[Chunk, None]:
    """Yield ``chunks`` once ``confirming`` is true. Close the generator at the end.

    Both are waited for at the same time. Raises ``OutdatedError`` if it is false, and the errors of
    ``chunks``; an error of a verifier that answered counts only if ``confirming`` is true."""
    first = asyncio.ensure_future(anext(chunks, None))
    try:
        await asyncio.wait((first, confirming), return_when=asyncio.FIRST_COMPLETED)
        if first.done() and isinstance(first.exception(), ConnectError):
            first.result()
        if not await asyncio.shield(confirming):
            raise OutdatedError("the verifier serves something else than before")
        chunk = await first
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    while chunk is not None:
        yield chunk
        chunk = await anext(chunks, None)


class BorrowingAgent(Agent):
    """An agent that borrows the texts of its target from a verifier before the first generation.

    In place of the bundled draft it takes the catalogue's draft for that target, as the commands do
    (``build.with_pulled_draft``).

    If an earlier process fetched the texts, they are used at once, and the first chunk of a text
    prompt waits until the verifier has confirmed them. If it has others now, they are fetched, and
    the generation begins anew. While no verifier sends texts (``takes_target_texts``), the agent
    tries again before each generation."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        tracer: Tracer | None = None,
        say: build.Say | None = None,
        beside: build.Fallback | None = None,
        connections: Connections | None = None,
    ) -> None:
        options, drafter = build.agent_options(config, ""), None
        # In place of the bundled draft the catalogue's may be used, once the target is known.
        waits = borrows_tokenizer(config) or (
            config.draft.model == build.BUNDLED and beside is None
        )
        if not waits:
            drafter = build.load_drafter(config, say=say, beside=beside)
        self._connections = connections or Connections(config, with_texts=True)
        self._owns_connections = connections is None
        transport = build.verifier_transport(config, self._connections.lease)
        super().__init__(transport, drafter, _no_text, _no_text, options, tracer=tracer)
        self._config, self._has_texts = config, False
        self._own_drafter = drafter
        """The draft that was loaded before any texts were there. It stays if they change."""
        self.reference = ""
        """The reference of the borrowed texts. Empty until they have arrived."""
        self._lock = asyncio.Lock()
        self._may_recall = True
        """Whether the answer of an earlier process may be used. False once it was outdated."""
        self._recalled: RecalledTarget | None = None
        self._confirming: asyncio.Task[bool] | None = None
        """Whether the verifier confirms the recalled texts. None for texts that it sent."""

    async def generate(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the target's output, as ``Agent.generate`` does, with the same ``options``."""
        while True:
            await self._prepare()
            # Token ids need no tokenizer. The verifier compares the vocabulary itself.
            confirming = self._confirming if isinstance(prompt, str) else None
            chunks = super().generate(prompt, sampling, **options)
            try:
                if confirming is not None:
                    chunks = confirmed_chunks(chunks, confirming)
                async for chunk in chunks:
                    yield chunk
                return
            except OutdatedError:
                await self._drop_texts(confirming)
            finally:
                await chunks.aclose()

    async def warm_up(self) -> None:
        """Connect to the verifiers, and borrow the texts, before the first generation needs them.
        Never raises: a failure meets the first generation again."""
        await super().warm_up()
        with suppress(LinkError, SetupError):
            async with self._lock:
                await self._try_texts()

    async def take_texts(self) -> None:
        """Borrow the target's texts now, unless that is done, and wait until the verifier has
        confirmed them.

        Raises ``GenerationError`` if no verifier sends them in the time that a first stream may
        take."""
        await self._prepare()
        while (confirming := self._confirming) is not None:
            try:
                async with asyncio.timeout(self.options.reconnect.give_up_first_s):
                    is_current = await asyncio.shield(confirming)
            except TimeoutError:
                why = self._connections.failures or "no verifier answers"
                raise ConnectError(f"gave up on the verifier: {why}") from None
            if is_current:
                return
            await self._drop_texts(confirming)
            await self._prepare()

    async def close(self) -> None:
        """Stop the running generations, free the model and close the connections that are its
        own."""
        if self._confirming is not None:
            self._confirming.cancel()
            await asyncio.gather(self._confirming, return_exceptions=True)
        await super().close()
        if self._owns_connections:
            await self._connections.close()

    async def _prepare(self) -> None:
        """Wait for a verifier's texts for as long as a first stream waits for a verifier."""
        policy = self.options.reconnect
        until, pause_s = time.monotonic() + policy.give_up_first_s, policy.first_s
        async with self._lock:
            while not self._has_texts:
                try:
                    await self._try_texts()
                except SetupError as error:
                    raise GenerationError(str(error), None) from error
                except LinkError as error:
                    if not error.retryable or time.monotonic() + pause_s > until:
                        raise ConnectError(f"gave up on the verifier: {error}") from error
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, policy.longest_s)

    async def _try_texts(self) -> None:
        """Take the texts of an earlier process, or borrow them now. Raises what ``_borrow``
        raises."""
        if self._has_texts:
            return
        self._connections.start()
        if self._may_recall:
            self._may_recall = False
            is_recalled = False
            with suppress(PoolBusyError, PoolLateError):
                is_recalled = await _WORKERS.run(self._recall_texts)
            if is_recalled:
                self._confirming = asyncio.create_task(self._confirm())
                return
        await self._borrow()

    def _recall_texts(self) -> bool:
        """Take the texts that an earlier process fetched, and return whether they are there."""
        self._recalled = recall_target(self._config, self._connections, _log_line)
        if self._recalled is None:
            return False
        try:
            self._use_texts(self._recalled.config, self._recalled.info)
        except SetupError:
            return False
        return True

    async def _confirm(self) -> bool:
        """Return whether the recalled texts are still the verifier's. Wait while none answers."""
        assert self._recalled is not None
        pause_s = self.options.reconnect.first_s
        while await self._connections.first_answer() is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self.options.reconnect.longest_s)
        return await self._recalled.is_current(self._connections)

    async def _drop_texts(self, outdated: asyncio.Task[bool] | None) -> None:
        """Forget texts that are not the verifier's any more, unless another caller did so."""
        async with self._lock:
            if self._confirming is outdated:
                logger.info("the verifier has other texts than before")
                self._confirming, self._has_texts = None, False
                if self.drafter is not self._own_drafter:
                    self.drafter_pool.close()
                    del self.drafter_pool
                    self.drafter = self._own_drafter

    async def _borrow(self) -> None:
        """Greet all verifiers once, and take the texts of the first one that fits.

        Raises ``LinkError`` if none fits but one may later, and ``SetupError`` if none will."""
        answers, wanted = await self._connections.answers(), self._config.model
        why, may_answer_later = [], False
        for address, answer in answers.items():
            if answer.info is None:
                why.append(answer.why)
                may_answer_later |= answer.error is not None and answer.error.retryable
            elif (model := answer.info.find_model(wanted)) is not None:
                try:
                    config = await _WORKERS.run(
                        build.with_pulled_draft, self._config, model, _log_line
                    )
                    config = await with_tokenizer(
                        config, model, self._warn_once, address, self._connections
                    )
                    await _WORKERS.run(self._use_texts, config, model)
                except (PoolBusyError, PoolLateError) as error:
                    raise LinkError(str(error)) from None
                except SetupError as error:
                    why.append(f"{address}: {error}")
                else:
                    return
            else:
                names = ", ".join(repr(one.name) for one in answer.info.models)
                why.append(f"{address} serves {names}, not {wanted!r}")
        if may_answer_later:
            raise LinkError("; ".join(why))
        raise SetupError("\n".join(why))

    def _use_texts(self, config: AgentConfig, target: ModelInfo) -> None:
        """Become an agent as ``build_agent`` makes it. Raises ``SetupError``."""
        try:
            text = build.load_tokenizer(reference := build.tokenizer_reference(config))
            options = replace(self.options, vocabulary=build.vocabulary_of(reference))
            pair = build.find_translation(config, options.vocabulary, target)
            drafter = self.drafter or build.load_drafter(config)
            options, drafter = build.fit_drafter(options, drafter, config, target, pair)
            if pair is not None:
                _log_line(build.describe_pair(pair))
            build.add_corpus(self.options.text_tables, config, text, None)
        except ValueError as error:
            raise SetupError(str(error)) from error
        self.options, self._vocabulary = options, options.vocabulary
        self.drafter, self.reference, self._has_texts = drafter, reference, True
        self._encode, self._decoder = text.encode, text.stream
        self._encode_continuation = partial(text.encode, add_special_tokens=False)
        self._read_constraint = device_grammar_reader(reference)


def _log_line(text: str) -> None:
    logger.info("%s", text)


def _no_text(*_: object) -> NoReturn:
    raise RuntimeError("no tokenizer was lent yet")

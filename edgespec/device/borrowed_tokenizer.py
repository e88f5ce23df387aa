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
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from edgespec.config import AgentConfig
from edgespec.config.common import SetupError
from edgespec.config.files import temporary_folder
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.errors import ConnectError, GenerationError
from edgespec.device import build
from edgespec.device.agent import Agent
from edgespec.models.folders import read_generation_sampling
from edgespec.models.grammar import device_grammar_reader
from edgespec.models.lent_texts import lent_folders, make_process_folder
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.toy import TOY
from edgespec.telemetry.trace import Tracer
from edgespec.wire.access import load_device_access
from edgespec.wire.tokenizer_lending import TOKENIZER_JSON, Announcement, TokenizerFetch
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

logger = logging.getLogger(__name__)

_NAME_DIGITS = 32
_WORKERS = WorkerPool("preparing a tokenizer", threads=2, max_waiting=64, timeout_s=300.0)


def borrows_tokenizer(config: AgentConfig) -> bool:
    """Return whether ``config`` names no tokenizer, so that the verifier's has to be used."""
    return not config.tokenizer and config.draft.model in (build.NONE, build.LOOKUP)


def takes_target_texts(config: AgentConfig) -> bool:
    """Return whether the texts of the target come from the verifier.

    They do if the user names no tokenizer and the draft is none of the toys."""
    return not config.tokenizer and config.draft.model not in (TOY, build.RANDOM)


async def with_tokenizer(
    config: AgentConfig, info: ModelInfo, say: build.Say, address: str = ""
) -> AgentConfig:
    """Return ``config`` with the texts of the target ``info`` in place of a tokenizer.

    If the verifier sends no texts, a model that comes with edgespec is used if its vocabulary is
    the same. Otherwise the draft's texts are used, and ``say`` is called with a line about it.

    Args:
        config: The configuration of the device.
        info: The model that the verifier serves.
        say: Called with lines for the user.
        address: Address of that verifier, by default the first one of ``config``.

    Raises:
        LinkError: The link was lost.
        SetupError: A device without a tokenizer cannot get one, or the files are of no use.
    """
    if not takes_target_texts(config):
        return config
    address = build.with_port(address or config.verifiers[0])
    transport = build.dial(address, load_device_access(config))
    try:
        fetch = TokenizerFetch(partial(transport.call_unary, "Tokenizer"), address)
        try:
            announced = await fetch.fetch_announcement()
        except LinkError as error:
            if error.retryable or borrows_tokenizer(config):
                raise
            return _keep_own_texts(config, info, say, str(error))
        if announced.facts is None and not borrows_tokenizer(config):
            return _keep_own_texts(config, info, say, "it is an older one")
        folder = await _fetch_texts(fetch, announced, info, say, config)
        return replace(config, tokenizer=str(folder))
    except LinkError as error:
        for own in (build.BUNDLED, TOY) if borrows_tokenizer(config) else ():
            if build.vocabulary_of(own) == info.vocabulary:
                return replace(config, tokenizer=own)
        if error.retryable:
            raise
        advice = "name a folder or Hub id that has it: --set tokenizer=NAME"
        raise SetupError(f"{error}\n  {advice}") from error
    finally:
        await transport.close()


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
    key = announced.sha256
    if announced.facts is not None:
        key = hashlib.sha256(announced.tokenizer_sha256 + announced.facts.sha256).digest()
    name = key.hex()[:_NAME_DIGITS]
    for parent in lent_folders():
        if (parent / name / TOKENIZER_JSON).is_file():
            return parent / name
    texts = await fetch.fetch_facts(announced)
    tokenizer = await _WORKERS.run(_read_own_tokenizer, config, announced.tokenizer_sha256)
    if tokenizer is None:
        size = f"{announced.size / 1e3:,.0f} kB"
        say(f"fetching the tokenizer of {info.name} from the verifier, once: {size}")
        whole = await fetch.fetch_texts(announced)
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
                work.rename(folder)
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
        why = str(error).replace(f"{folder}/", "")
        raise LinkError(f"{subject} cannot be used: {why}", retryable=False) from error
    if (vocabulary := tokenizer.vocabulary) != info.vocabulary:
        raise LinkError(
            f"{subject} has the vocabulary {vocabulary}, but it serves {info.vocabulary}",
            retryable=False,
        )


class BorrowingAgent(Agent):
    """An agent that borrows the texts of its target from a verifier before the first generation.

    In place of the bundled draft it takes the catalogue's draft for that target, as the commands do
    (``build.with_pulled_draft``).

    While no verifier sends them (``takes_target_texts``), it tries again before each generation."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        tracer: Tracer | None = None,
        say: build.Say | None = None,
        beside: build.Fallback | None = None,
    ) -> None:
        options, drafter = build.agent_options(config, ""), None
        # In place of the bundled draft the catalogue's may be used, once the target is known.
        waits = borrows_tokenizer(config) or (
            config.draft.model == build.BUNDLED and beside is None
        )
        if not waits:
            drafter = build.load_drafter(config, say=say, beside=beside)
        transport = build.verifier_transport(config)
        super().__init__(transport, drafter, _no_text, _no_text, options, tracer=tracer)
        self._config, self._has_texts = config, False
        self.reference = ""
        """The reference of the borrowed texts. Empty until they have arrived."""
        self._lock = asyncio.Lock()

    async def take_texts(self) -> None:
        """Borrow the target's texts now, unless that is done.

        Raises ``GenerationError`` if no verifier sends them in the time that a first stream may
        take."""
        await self._prepare()

    async def _prepare(self) -> None:
        """Wait for a verifier's texts for as long as a first stream waits for a verifier."""
        policy = self.options.reconnect
        until, pause_s = time.monotonic() + policy.give_up_first_s, policy.first_s
        async with self._lock:
            while not self._has_texts:
                try:
                    await self._borrow()
                except SetupError as error:
                    raise GenerationError(str(error), None) from error
                except LinkError as error:
                    if not error.retryable or time.monotonic() + pause_s > until:
                        raise ConnectError(f"gave up on the verifier: {error}") from error
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, policy.longest_s)

    async def _borrow(self) -> None:
        """Probe all verifiers once, and take the texts of the first one that fits.

        Raises ``LinkError`` if none fits but one may later, and ``SetupError`` if none will."""
        answers, wanted = await build.probe_verifiers(self._config), self._config.model
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
                    config = await with_tokenizer(config, model, self._warn_once, address)
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

"""A device without a draft model has no tokenizer of its own: it takes the verifier's.

What comes is bounded and checked against its announced SHA-256, has to be readable, and has to have
the vocabulary that the verifier serves; only then it is put into the user's cache, under its hash.
It is a program by a stranger, so it is read, and runs, in a process with bounds (``FarTokenizer``).
"""

from __future__ import annotations

import asyncio
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
from edgespec.device import build
from edgespec.device.agent import Agent, GenerationError
from edgespec.models.far_tokenizer import FarTokenizer
from edgespec.models.grammar import device_reader
from edgespec.models.toy import TOY
from edgespec.wire.access import device_access
from edgespec.wire.tokenizer_lending import TOKENIZER_JSON, TokenizerFetch
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

_NAME_DIGITS = 32
_WORK = WorkerPool("preparing a tokenizer", threads=2, most_waiting=64, within_s=300.0)


def borrows_tokenizer(config: AgentConfig) -> bool:
    """Whether nothing in ``config`` names a tokenizer, so that the verifier's is used."""
    return not config.tokenizer and config.draft.model in (build.NONE, build.LOOKUP)


async def with_tokenizer(
    config: AgentConfig, info: ModelInfo, say: build.Say, address: str = ""
) -> AgentConfig:
    """``config``, with the tokenizer of the verifier at ``address`` (empty: its first), which
    serves ``info``, where it has none of its own. A verifier that sends none, but has the
    vocabulary of a model that comes with edgespec, is met with that one's. Raises ``LinkError``
    where the link was lost, and ``SetupError`` where this verifier will never lend one."""
    if not borrows_tokenizer(config):
        return config
    address = build.with_port(address or config.verifiers[0])
    transport = build.dial(address, device_access(config))
    try:
        fetch = TokenizerFetch(partial(transport.ask, "Tokenizer"), address)
        return replace(config, tokenizer=str(await _cached(fetch, info, say)))
    except LinkError as error:
        for own in (build.BUNDLED, TOY):
            if build.vocabulary_of(own) == info.vocabulary:
                return replace(config, tokenizer=own)
        if error.retryable:
            raise
        advice = "name a folder or Hub id that has it: --set tokenizer=NAME"
        raise SetupError(f"{error}\n  {advice}") from error
    finally:
        await transport.close()


async def _cached(fetch: TokenizerFetch, info: ModelInfo, say: build.Say) -> Path:
    """The folder of the verifier's tokenizer. Raises ``LinkError``, also for one of no use."""
    announced = await fetch.announced()
    folder = build.lent_folder() / announced.sha256.hex()[:_NAME_DIGITS]
    if not (folder / TOKENIZER_JSON).is_file():
        size = f"{announced.size / 1e3:,.0f} kB"
        say(f"fetching the tokenizer of {info.name} from the verifier, once: {size}")
        texts = await fetch.texts(announced)
        try:
            await _WORK.run(_place, folder, texts, info)
        except (PoolBusyError, PoolLateError) as error:
            raise LinkError(str(error)) from None
    return folder


def _place(folder: Path, texts: Mapping[str, bytes], info: ModelInfo) -> None:
    """Write the files beside ``folder``, try them, and move them there, unless another process was
    faster: that reads them by now. Raises ``LinkError`` for a tokenizer that cannot be used,
    ``SetupError`` where nothing can be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent, ".fetch-") as place:
            work = place / "texts"
            for name, content in texts.items():
                (path := work / name).parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            _try(work, info)
            if not (folder / TOKENIZER_JSON).is_file():
                shutil.rmtree(folder, ignore_errors=True)
                work.rename(folder)
    except LinkError:
        raise
    except OSError as error:
        if not (folder / TOKENIZER_JSON).is_file():  # else another process was faster
            raise SetupError(f"the verifier's tokenizer cannot be kept: {error}") from error


def _try(folder: Path, info: ModelInfo) -> None:
    """Raises ``LinkError`` where the files are no tokenizer of ``info``."""
    who = f"the tokenizer that the verifier of {info.name!r} sent"
    try:
        tokenizer = FarTokenizer(folder)
        tokenizer.close()
    except ValueError as error:
        why = str(error).replace(f"{folder}/", "")
        raise LinkError(f"{who} cannot be used: {why}", retryable=False) from error
    if (found := tokenizer.vocabulary) != info.vocabulary:
        raise LinkError(
            f"{who} has the vocabulary {found}, but it serves {info.vocabulary}", retryable=False
        )


class BorrowingAgent(Agent):
    """For a ``config`` that names no tokenizer (``borrows_tokenizer``). It is asked for before the
    first text, and again before the next one while nobody lends."""

    def __init__(self, config: AgentConfig) -> None:
        options = build.agent_options(config, "")
        super().__init__(build.verifier_transport(config), None, _no_text, _no_text, options)
        self._config, self._lent = config, False
        self._one_at_a_time = asyncio.Lock()

    async def _ready(self) -> None:
        """A verifier is waited for as long as a first stream is."""
        policy = self.options.reconnect
        until, pause_s = time.monotonic() + policy.give_up_first_s, policy.first_s
        async with self._one_at_a_time:
            while not self._lent:
                try:
                    await self._borrow()
                except SetupError as error:
                    raise GenerationError(str(error), None) from error
                except LinkError as error:
                    if not error.retryable or time.monotonic() + pause_s > until:
                        raise GenerationError(f"gave up on the verifier: {error}", None) from error
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, policy.longest_s)

    async def _borrow(self) -> None:
        """Ask all verifiers once, and take the tokenizer of the first of them that fits. Raises
        ``LinkError`` where nobody answers who may do so later, ``SetupError`` where nobody will."""
        answers, wanted = await build.ask_verifiers(self._config), self._config.model
        why, may_come = [], False
        for address, answer in answers.items():
            if answer.info is None:
                why.append(answer.why)
                may_come |= answer.error is not None and answer.error.retryable
            elif (model := answer.info.of(wanted)) is not None:
                config = await with_tokenizer(self._config, model, lambda text: None, address)
                try:
                    await _WORK.run(self._take, config)
                except (PoolBusyError, PoolLateError) as error:
                    raise LinkError(str(error)) from None
                return
            else:
                names = ", ".join(repr(one.name) for one in answer.info.served)
                why.append(f"{address} serves {names}, not {wanted!r}")
        if may_come:
            raise LinkError("; ".join(why))
        raise SetupError("\n".join(why))

    def _take(self, config: AgentConfig) -> None:
        """From here on this is an agent as ``build_agent`` makes it. Raises ``SetupError``."""
        try:
            text = build.load_tokenizer(reference := build.tokenizer_reference(config))
            vocabulary, drafter = build.vocabulary_of(reference), build.load_drafter(config)
            build.add_corpus(self.options.text, config, text, None)
        except ValueError as error:
            raise SetupError(str(error)) from error
        self.options = replace(self.options, vocabulary=vocabulary)
        self._vocabulary, self.drafter, self._lent = vocabulary, drafter, True
        self._encode, self._decoder = text.encode, text.stream
        self._read_constraint = device_reader(reference)


def _no_text(*_: object) -> NoReturn:
    raise RuntimeError("no tokenizer was lent yet")

"""A device without a draft model has no tokenizer of its own: it takes the verifier's.

What comes is bounded and checked against its announced SHA-256, has to be readable, and has to have
the vocabulary that the verifier serves; only then it is put into the user's cache, under the hash
of its files. One that lies there is checked again before it is used.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from edgespec.config import AgentConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.device.build import BUNDLED, LOOKUP, NONE, dial, vocabulary_of, with_port
from edgespec.models.folders import cache_folder, vocabulary_fingerprint
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.toy import TOY
from edgespec.wire.access import device_access
from edgespec.wire.tokenizer_lending import TextFile, TokenizerFetch, are_as_announced, cache_key

Say = Callable[[str], None]
_FOLDER = "tokenizers"


def borrows_tokenizer(config: AgentConfig) -> bool:
    """Whether nothing in ``config`` names a tokenizer, so that the verifier's is used."""
    return not config.tokenizer and config.draft.model in (NONE, LOOKUP)


async def with_tokenizer(
    config: AgentConfig, info: ModelInfo, say: Say, address: str = ""
) -> AgentConfig:
    """``config``, with the tokenizer of the verifier at ``address``, which serves ``info``, where
    it has none of its own; ``address`` empty: the first one. A verifier that sends none, but has
    the vocabulary of a model that comes with edgespec, is met with that one's. Raises
    ``SetupError`` saying what to give."""
    if not borrows_tokenizer(config):
        return config
    try:
        return await with_lent_tokenizer(config, info, say, address or config.verifiers[0])
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
        folder = await _cached(fetch, info, partial(_tell, say, info.name))
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


async def _cached(fetch: TokenizerFetch, info: ModelInfo, told: Say) -> Path:
    """The folder of the verifier's tokenizer. Raises ``LinkError``, also for one of no use."""
    entries = await fetch.entries()
    folder = cache_folder() / _FOLDER / cache_key(entries)
    if await asyncio.to_thread(_is_whole, folder, entries):
        return folder
    size = sum(entry.size for entry in entries)
    sent = sum(entry.packed_size for entry in entries)
    told(f"{size / 1e3:,.0f} kB, {sent / 1e3:,.0f} kB packed")
    contents = {entry.name: await fetch.content(entry) for entry in entries}
    await asyncio.to_thread(_place, folder, entries, contents, info)
    return folder


def _tell(say: Say, name: str, size: str) -> None:
    say(f"fetching the tokenizer of {name} from the verifier, once: {size}")


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

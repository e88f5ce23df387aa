"""Pictures in ``edgespec chat``: attached to one message, and kept in the conversation.

Oracle: the prompts and the pictures that the agent is given.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli import chat
from edgespec.cli.chat import KeptFile, Record, read_record
from edgespec.cli.chat_terminal import SignalRunner
from edgespec.config import AgentConfig
from edgespec.core.device.events import TokenKind
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.pictures import PictureInput, PlacedPicture
from edgespec.device.agent import Chunk, Piece
from edgespec.models.toy import TOY_PICTURE, ToyTokenizer, toy_info
from tests.kit.pictures import png

CAT, DOG = png(8, 8, seed=1), png(9, 9, seed=2)
SEEING = replace(toy_info(), pictures=PictureInput(TOY_PICTURE, max_count=2, max_pixels=100))


class NotingAgent:
    """An agent that answers with one word and notes what it was given."""

    stats = None

    def __init__(self) -> None:
        self.given: list[tuple[str, tuple[PlacedPicture, ...]]] = []

    async def generate(
        self, prompt: Sequence[int], *_: Any, pictures: Sequence[PlacedPicture], **more: Any
    ) -> AsyncGenerator[Chunk, None]:
        self.given.append((ToyTokenizer().decode(prompt), tuple(pictures)))
        yield Chunk(1, (1,), (Piece("yes", TokenKind.DECODED),))
        yield Chunk(2, (), (), FinishReason.STOP)


@pytest.fixture
def runner() -> Iterator[SignalRunner]:
    with SignalRunner() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(CAT)
    (tmp_path / "dog.png").write_bytes(DOG)
    (tmp_path / "large.png").write_bytes(png(11, 10))
    (tmp_path / "text.txt").write_text("text")
    return tmp_path


def converse(
    runner: SignalRunner, *lines: str, info: ModelInfo = SEEING, record: Record | None = None
) -> tuple[NotingAgent, Record]:
    """Hold a conversation line by line; return the agent and what was saved."""
    remaining = iter(lines)
    agent: Any = NotingAgent()
    anything: Any = None

    def ask() -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    kept = KeptFile()
    chat.Conversation(
        agent=agent,
        tokenizer=ToyTokenizer(),
        config=AgentConfig(),
        runner=runner,
        info=info,
        status=anything,
        record=record or Record(),
        kept=kept,
        read_message=ask,
    ).run()
    return agent, read_record(kept.path) if kept.path.exists() else Record()


def test_a_picture_goes_with_one_message_and_stays_in_the_conversation(
    runner: SignalRunner, folder: Path
) -> None:
    agent, saved = converse(
        runner, "/picture cat.png", "/picture dog.png", "look", "again", "/reset", "hi"
    )
    placed = (PlacedPicture(0, CAT), PlacedPicture(1, DOG))
    assert agent.given[:2] == [("99look ", placed), ("99look yes again ", placed)]
    assert agent.given[2] == ("hi ", ())
    assert [one["content"] for one in saved.messages] == ["look", "yes", "again", "yes"]


def test_a_saved_conversation_finds_its_pictures_again(runner: SignalRunner, folder: Path) -> None:
    _, saved = converse(runner, "/picture cat.png", "look")
    assert saved.messages[0]["pictures"] == [str(folder / "cat.png")]
    agent, _ = converse(runner, "and now", record=saved)
    assert agent.given == [("9look yes and now ", (PlacedPicture(0, CAT),))]


def test_a_picture_that_is_gone_is_said(
    runner: SignalRunner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, saved = converse(runner, "/picture cat.png", "look")
    (folder / "cat.png").unlink()
    agent, _ = converse(runner, "and now", record=saved)
    assert not agent.given
    assert f"error: {folder / 'cat.png'}: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "info", "words"),
    [
        pytest.param(["/picture"], SEEING, "/picture needs the name of a file", id="no-name"),
        pytest.param(
            ["/picture none.png"], SEEING, "none.png: cannot be read: No such file", id="no-file"
        ),
        pytest.param(
            ["/picture text.txt"], SEEING, "text.txt is no picture in a known format", id="text"
        ),
        pytest.param(
            ["/picture large.png"],
            SEEING,
            "large.png has 11 x 10 = 110 pixels, but a picture may have at most 100",
            id="too-large",
        ),
        pytest.param(
            ["/picture cat.png"], toy_info(), "'toy' reads text only here", id="text-model"
        ),
        pytest.param(
            [*["/picture cat.png"] * 3, "look"],
            SEEING,
            "the conversation has 3 pictures, but at most 2 are read",
            id="too-many",
        ),
        pytest.param(
            ["/picture cat.png", "a 9"],
            SEEING,
            "has 2 placeholders (token 62) for 1 pictures",
            id="placeholder-in-the-text",
        ),
    ],
)
def test_what_cannot_be_attached_is_said(
    runner: SignalRunner,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[str],
    info: ModelInfo,
    words: str,
) -> None:
    agent, _ = converse(runner, *lines, info=info)
    assert not agent.given
    assert words in capsys.readouterr().err


def test_a_file_with_other_pictures_than_paths_is_no_conversation(folder: Path) -> None:
    record = Record(messages=[{"role": "user", "content": "a", "pictures": [3]}])
    record.write(folder / "talk.json")
    with pytest.raises(chat.ConversationError, match="pictures must be a list of paths"):
        read_record(folder / "talk.json")

"""Tests of the choice between several verifiers: which are probed, which is chosen, and the
messages. Oracles: toy verifiers over real gRPC, and loopbacks whose answers are late by a known
time on a clock of the test."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import Result

from edgespec.cli.device import choose_verifier, judge_draft
from edgespec.config import AgentConfig, ConfigError, DraftSection, LimitsSection, VerifierConfig
from edgespec.core.association.known_verifiers import make_views
from edgespec.core.association.policies import Association, rank_verifiers
from edgespec.core.ports import DeviceStream, LinkError, ModelInfo
from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import prober
from edgespec.device.build import build_agent
from edgespec.models.toy import ToyTokenizer
from edgespec.testing import LoopbackTransport
from edgespec.verifier.build import load_target
from tests.kit.echo_verifier import echo
from tests.kit.live_verifier import GatedTarget, run_command, serve_toy, start_daemon, toy_text
from tests.present import require

MODEL = ModelInfo("toy", "v1", 64, 4096)
SLOW_S = 0.150
PROMPT = "once upon a time"


def info_of(sessions: int = 0, pass_us: int = 0) -> VerifierInfo:
    return VerifierInfo(MODEL, Limits(), sessions, 8, pass_us)


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every probe ample time, also in commands, because a busy machine answers late."""
    monkeypatch.setattr(prober.probe_all, "__defaults__", (60.0,))


class Clock:
    """A clock that moves only when a simulated answer takes time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Distant(LoopbackTransport):
    """A transport that answers at once, but ``SLOW_S`` later by the clock. The first answer, which
    opens the channel, takes longer still."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(echo, info_of)
        self._clock, self._set_up_s = clock, 3.0

    async def info(self) -> VerifierInfo:
        self._clock.now += SLOW_S + self._set_up_s
        self._set_up_s = 0.0
        return await super().info()


class Failing:
    """A transport whose probe raises the given error, or never answers."""

    is_idle = False

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def connect(self) -> DeviceStream:
        raise NotImplementedError

    async def info(self) -> VerifierInfo:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def close(self) -> None: ...


async def test_the_round_trip_is_timed_and_not_the_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "time", clock := Clock())
    link = Distant(clock)
    answer = await prober.probe(link, timed=True)
    await link.close()
    assert (answer.info, answer.error) == (info_of(), None)
    assert answer.rtt_s == pytest.approx(SLOW_S)


@pytest.mark.parametrize(
    ("error", "why", "retryable"),
    [
        (None, "no answer within 0.05 s", True),
        (LinkError("nobody home"), "nobody home", True),
        (LinkError("no key", retryable=False), "no key", False),
        (
            ZeroDivisionError("a bug\x1b[2J"),
            "ZeroDivisionError: a bug\N{REPLACEMENT CHARACTER}[2J",
            True,
        ),
    ],
)
async def test_one_that_gives_no_answer_says_why_and_holds_up_no_other(
    error: Exception | None, why: str, retryable: bool
) -> None:
    good = LoopbackTransport(echo, info_of)
    answers = await prober.probe_all({"bad": Failing(error), "good": good}, 0.05)
    await good.close()
    assert list(answers) == ["bad", "good"]
    assert answers["good"].info == info_of()
    assert answers["bad"].info is None
    assert answers["bad"].why == why
    assert require(answers["bad"].error).retryable is retryable


@pytest.mark.parametrize(
    ("known", "order"),
    [
        ((("far", (0, 0), 0, 0.1), ("near", (0, 0), 0, 0.02)), "near far"),
        ((("near", (0, 400000), 0, 0.0), ("far", (0, 20000), 0, 0.15)), "far near"),
        # A verifier that has timed no pass yet counts as an average one.
        (
            (("new", (0, 0), 0, 0.0), ("quick", (0, 10000), 0, 0.0), ("slow", (0, 40000), 0, 0.0)),
            "quick new slow",
        ),
        ((("full", (8, 0), 8, 0.0), ("free", (7, 0), 7, 0.1)), "free full"),
        ((("full", (8, 0), 8, 0.0), ("too", (8, 0), 8, 0.1)), "full too"),
        ((("busy", (5, 0), 5, 0.0), ("idle", (2, 0), 2, 0.0)), "idle busy"),
        ((("first", (0, 0), 0, 0.0), ("second", (0, 0), 0, 0.0)), "first second"),
        # Nothing is known of the new verifier, so it counts as the others do.
        ((("there", (0, 20000), 0, 0.02), ("new", None, None, None)), "there new"),
    ],
)
def test_the_shortest_round_comes_first(
    known: list[tuple[str, tuple[int, int] | None, int | None, float | None]], order: str
) -> None:
    """``known`` gives each verifier's sessions and microseconds per pass, its load, and its
    delay."""
    views = make_views(
        [(name, said and info_of(*said), n, rtt_s) for name, said, n, rtt_s in known]
    )
    assert rank_verifiers(Association.LOWEST_DELAY, "", views) == order.split()
    listed = [address for address, said, _, _ in known if said is None or said[0] < 8]
    assert rank_verifiers(Association.LISTED, "", views)[: len(listed)] == listed


async def test_a_full_verifier_is_passed_over() -> None:
    small = VerifierConfig(model="toy", port=0, limits=LimitsSection(max_sessions=1))
    gated = GatedTarget(load_target(small), free_passes=1)
    async with serve_toy(gated, config=small) as (full, _), serve_toy() as (free, _):
        async with build_agent(AgentConfig(full, draft=DraftSection("toy"))) as agent:
            chunks = agent.generate(PROMPT, SamplingParams(max_tokens=400))
            await anext(chunks)
            given = AgentConfig((full, free), draft=DraftSection("toy"), tokenizer="toy")
            config, _ = await choose_verifier(given)
            gated.gate.set()
            await chunks.aclose()
    assert config.verifiers == (free, full)


def generate(*arguments: object) -> Result:
    return run_command("generate", PROMPT, "--draft", "toy", "-n", 16, *arguments)


def text() -> str:
    tokenizer = ToyTokenizer()
    ids = toy_text(tokenizer.encode(PROMPT), SamplingParams(max_tokens=16))
    return tokenizer.decode(ids) + "\n"


def test_a_dead_verifier_is_named_and_the_other_one_used(
    address: str, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that an earlier test left in the cache would be used without looking further."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = generate("--verifier", dead, "--verifier", address, "--stats")
    assert (result.exit_code, result.stdout) == (0, text())
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"not used: {dead} (")
    assert lines[1].startswith(f"using {address} (lowest-delay): round trip ")
    assert lines[1].endswith("of 64 sessions")
    assert f"served by {address}; 0 failovers" in result.stderr
    assert "served by" not in generate("--verifier", address, "--stats").stderr


@pytest.mark.parametrize("spare", ["dead", "misfit"])
def test_a_remembered_verifier_hides_no_other_that_is_not_used(
    spare: str, address: str, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second command knows the verifier from the first one and does not choose any more."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert generate("--verifier", address).exit_code == 0
    with start_daemon("--model", "bundled") as (bundled, _):
        other = dead if spare == "dead" else bundled
        result = generate("--verifier", address, "--verifier", other)
    assert (result.exit_code, result.stdout) == (0, text())
    lines = [line for line in result.stderr.splitlines() if line.startswith("not used: ")]
    (line,) = lines
    assert line.startswith(f"not used: {other} (")
    assert address not in line


def test_several_come_from_the_environment_and_from_a_file(
    address: str, dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_VERIFIER", f"{dead} {address}")
    result = generate()
    assert (result.exit_code, result.stdout) == (0, text())
    monkeypatch.delenv("EDGESPEC_VERIFIER")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no verifier is remembered
    path = tmp_path / "agent.yaml"
    path.write_text(f"verifier: [{dead}, {address}]\nassociation: listed\n")
    result = generate("--config", path)
    assert (result.exit_code, result.stdout) == (0, text())
    assert f"using {address} (listed)" in result.stderr


def test_none_there_says_so_for_each_and_how_to_start_one(dead: str) -> None:
    other = "127.0.0.1:1"
    result = generate("--verifier", dead, "--verifier", other)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: none of 2 verifiers can be used" in result.stderr
    for words in (f"  {dead}: ", f"  {other}: ", "start one:           edgespec verifier"):
        assert words in result.stderr


def test_doctor_asks_each(address: str, dead: str) -> None:
    shown = run_command("doctor", "--verifier", address, "--verifier", dead).stdout
    assert f"verifier at {address}: serves toy" in shown
    assert f"verifier at {dead}: " in shown


async def test_a_command_keeps_the_others_for_when_the_chosen_one_fails() -> None:
    other = VerifierConfig(model="toy", name="other", port=0)
    async with (
        serve_toy() as (one, _),
        serve_toy() as (two, _),
        serve_toy(config=other) as (wrong, _),
    ):
        dead = "127.0.0.1:1"
        given = AgentConfig((dead, wrong, one, two), model="toy", draft=DraftSection("toy"))
        config, info = await choose_verifier(given)
    assert (info.name, config.association) == ("toy", Association.LISTED)
    assert set(config.verifiers[:2]) == {one, two}
    assert config.verifiers[2:] == (dead,)


def test_the_key_goes_to_none_of_several_that_others_could_listen_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", "word")
    with pytest.raises(ConfigError, match="the key for gpu-box:7420 would be sent without TLS"):
        build_agent(AgentConfig(("127.0.0.1", "gpu-box"), draft=DraftSection("toy")))


@pytest.mark.parametrize(
    ("tried", "hits", "advises"),
    [(0, 0, False), (23, 0, False), (24, 9, True), (24, 10, False), (1000, 399, True)],
)
def test_a_draft_that_is_rarely_right_is_named_with_what_helps(
    tried: int, hits: int, advises: bool
) -> None:
    found = judge_draft(tried, hits)
    assert bool(found) is advises
    if advises:
        assert f"right at {hits} of {tried} places" in found
        assert "edgespec distill" in found
    translated = judge_draft(tried, hits, is_translated=True)
    assert bool(translated) is (tried >= 24)
    assert ("edgespec distill" in translated) is advises

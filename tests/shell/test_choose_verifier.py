"""Several verifiers: who is asked, who is chosen, what is said. Toy verifiers over real gRPC, and
loopbacks whose answers take their time on a clock of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgespec.api import connect as edgespec_connect
from edgespec.cli.device import greet
from edgespec.cli.main import app
from edgespec.config import (
    AgentConfig,
    ConfigError,
    DraftSection,
    LimitsSection,
    LinkSection,
    VerifierConfig,
    load_config,
)
from edgespec.core.association.network import FEATURES
from edgespec.core.association.policies import DeviceView, LowestDelay, MostCompute
from edgespec.core.ports import DeviceStream, ModelInfo, Transport
from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent, connect
from edgespec.device.choose_verifier import NoneFitsError, choose_verifier
from edgespec.models.toy import ToyTokenizer
from edgespec.verifier.build import load_target
from tests.shell.echo_verifier import echo
from tests.shell.live_verifier import GatedTarget, daemon, nobody, serving, toy_text
from tests.shell.loopback import LoopbackTransport

DEVICE = DeviceView("laptop", 0.008)
MODEL = ModelInfo("toy", "v1", 64, 4096)
SLOW_S = 0.150
SET_UP_S = 3.0
PROMPT = "once upon a time"


def told(sessions: int = 0, pass_us: int = 0, model: ModelInfo = MODEL) -> VerifierInfo:
    return VerifierInfo(model, Limits(), sessions, 8, pass_us)


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there may take its time to say so, also where a command asks."""
    defaults = {**(choose_verifier.__kwdefaults__ or {}), "timeout_s": 60.0}
    monkeypatch.setattr(choose_verifier, "__kwdefaults__", defaults)


class Clock:
    """Stands still but for the answers that take their time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Distant(LoopbackTransport):
    """Answers at once, and ``rtt_s`` later by the clock; the first time, which opens the channel,
    later still."""

    def __init__(self, info: VerifierInfo, clock: Clock, rtt_s: float) -> None:
        super().__init__(echo, lambda: info)
        self._clock, self._rtt_s, self._set_up_s = clock, rtt_s, SET_UP_S

    async def info(self) -> VerifierInfo:
        self._clock.now += self._rtt_s + self._set_up_s
        self._set_up_s = 0.0
        return await super().info()


def transport(info: VerifierInfo) -> Transport:
    return LoopbackTransport(echo, lambda: info)


class Buggy:
    """A transport that fails in a way that it should not."""

    async def connect(self) -> DeviceStream:
        raise NotImplementedError

    async def info(self) -> VerifierInfo:
        raise ZeroDivisionError("a bug\x1b[2J")

    async def close(self) -> None: ...


async def test_a_bug_in_one_transport_leaves_out_one_verifier() -> None:
    links: dict[str, Transport] = {"one:1": Buggy(), "two:2": transport(told())}
    choice = await choose_verifier(links, LowestDelay(), DEVICE)
    assert choice.chosen.address == "two:2"
    why = "ZeroDivisionError: a bug\N{REPLACEMENT CHARACTER}[2J"
    assert choice.left_out == (("one:1", why),)


class Silent:
    """A verifier that takes the question and never answers."""

    async def connect(self) -> DeviceStream:
        raise AssertionError("only asked")

    async def info(self) -> VerifierInfo:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async def close(self) -> None:
        return


@contextlib.asynccontextmanager
async def closing(links: dict[str, Transport]) -> AsyncIterator[dict[str, Transport]]:
    """Closes all of them, those too that a test has taken out meanwhile."""
    opened = tuple(links.values())
    yield links
    for link in opened:
        await link.close()


async def test_the_nearest_of_equal_verifiers_is_chosen() -> None:
    clock = Clock()
    links: dict[str, Transport] = {
        "far": Distant(told(), clock, SLOW_S),
        "near": Distant(told(), clock, SLOW_S / 4),
    }
    async with closing(links):
        choice = await choose_verifier(links, LowestDelay(), DEVICE, clock=clock)
    assert (choice.chosen.address, choice.left_out) == ("near", ())


async def test_the_round_trip_is_timed_and_not_the_set_up() -> None:
    clock = Clock()
    async with closing({"far": Distant(told(), clock, SLOW_S)}) as links:
        choice = await choose_verifier(links, LowestDelay(), DEVICE, clock=clock)
    assert choice.chosen.rtt_s == pytest.approx(SLOW_S)


async def test_a_faster_target_outweighs_a_longer_link() -> None:
    clock = Clock()
    links: dict[str, Transport] = {
        "near": Distant(told(pass_us=400_000), clock, 0.0),
        "far": Distant(told(pass_us=20_000), clock, SLOW_S),
    }
    async with closing(links):
        choice = await choose_verifier(links, LowestDelay(), DEVICE, clock=clock)
    assert choice.chosen.address == "far"


async def test_one_that_timed_no_pass_yet_counts_as_an_average_one() -> None:
    infos = {"a": told(pass_us=10_000), "new": told(), "c": told(pass_us=40_000)}
    async with closing({name: transport(info) for name, info in infos.items()}) as links:
        assert (await choose_verifier(links, MostCompute(), DEVICE)).chosen.address == "a"
        del links["a"]
        assert (await choose_verifier(links, MostCompute(), DEVICE)).chosen.address in ("new", "c")


async def test_a_full_verifier_is_passed_over_unless_all_are() -> None:
    clock = Clock()
    links: dict[str, Transport] = {
        "full": Distant(told(8), clock, 0.0),
        "free": Distant(told(7), clock, SLOW_S),
    }
    async with closing(links):
        choice = await choose_verifier(links, LowestDelay(), DEVICE, clock=clock)
        assert choice.chosen.address == "free"
        del links["free"]
        choice = await choose_verifier(links, LowestDelay(), DEVICE, clock=clock)
        assert choice.chosen.address == "full"


async def test_the_silent_the_refusing_and_the_unfit_are_left_out_with_their_reasons() -> None:
    refusing = LoopbackTransport(echo, told)
    refusing.refuse("nobody home")
    other = told(model=ModelInfo("other", "v2", 64, 4096))
    links: dict[str, Transport] = {
        "silent": Silent(),
        "refusing": refusing,
        "unfit": transport(other),
        "good": transport(told()),
    }

    def misfit(info: VerifierInfo) -> str | None:
        spoken = info.model.vocabulary
        return None if spoken == "v1" else f"speaks {spoken}"

    async with closing(links):
        choice = await choose_verifier(links, LowestDelay(), DEVICE, misfit, timeout_s=0.05)
        reasons = (
            ("silent", "no answer within 0.05 s"),
            ("refusing", "nobody home"),
            ("unfit", "speaks v2"),
        )
        assert (choice.chosen.address, choice.left_out) == ("good", reasons)
        del links["good"]
        with pytest.raises(NoneFitsError, match="none of 3 verifiers can be used") as caught:
            await choose_verifier(links, LowestDelay(), DEVICE, misfit, timeout_s=0.05)
    assert caught.value.reasons == reasons


async def test_a_live_verifier_tells_its_pass_time_once_it_has_one() -> None:
    async with serving() as (address, _):
        link = connect(address)
        assert (await link.info()).pass_us == 0
        async with build_agent(AgentConfig(address, draft=DraftSection("toy"))) as agent:
            async for _chunk in agent.generate(PROMPT, SamplingParams(max_tokens=8)):
                pass
        assert (await link.info()).pass_us > 0
        await link.close()


async def test_of_two_over_grpc_the_one_behind_no_slow_link_is_chosen() -> None:
    # These times are real: the link is slower than what a busy machine adds to the other one.
    slow = LinkSection(rtt_ms=800.0)
    async with serving() as (far, _), serving() as (near, _):
        links = {far: connect(far, slow), near: connect(near)}
        async with closing(links):
            choice = await choose_verifier(links, LowestDelay(), DEVICE)
    assert choice.chosen.address == near


async def test_a_full_verifier_over_grpc_is_passed_over() -> None:
    small = VerifierConfig(model="toy", port=0, limits=LimitsSection(max_sessions=1))
    gated = GatedTarget(load_target(small), free_passes=1)
    async with serving(gated, config=small) as (full, _), serving() as (free, _):
        async with build_agent(AgentConfig(full, draft=DraftSection("toy"))) as agent:
            chunks = agent.generate(PROMPT, SamplingParams(max_tokens=400))
            await anext(chunks)
            links = {
                full: connect(full),
                free: connect(free, LinkSection(rtt_ms=SLOW_S * 1e3)),
            }
            async with closing(links):
                choice = await choose_verifier(links, LowestDelay(), DEVICE)
            gated.gate.set()
            await chunks.aclose()
    assert choice.chosen.address == free


# --- the command line -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with daemon() as (where, _):
        yield where


@pytest.fixture
def dead() -> Iterator[str]:
    with nobody() as address:
        yield address


def generate(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    given = ["generate", PROMPT, "--draft", "toy", "-n", "16", *arguments]
    return CliRunner().invoke(app, given, env=environment)


def text() -> str:
    tokenizer = ToyTokenizer()
    ids = toy_text(tokenizer.encode(PROMPT), SamplingParams(max_tokens=16))
    return tokenizer.decode(ids) + "\n"


def test_a_dead_verifier_is_named_and_the_other_one_used(address: str, dead: str) -> None:
    result = generate("--verifier", dead, "--verifier", address)
    assert (result.exit_code, result.stdout) == (0, text())
    lines = result.stderr.splitlines()
    assert lines[0].startswith(f"left out: {dead} (")
    assert lines[1].startswith(f"using {address} (lowest-delay): round trip ")
    assert lines[1].endswith("of 64 sessions")


def test_one_verifier_is_used_without_a_word(address: str) -> None:
    assert generate("--verifier", address).stderr == ""
    assert generate("--verifier", address, "--verifier", address).stderr == ""


def test_several_come_from_the_environment_and_from_a_file(
    address: str, dead: str, tmp_path: Path
) -> None:
    result = generate(environment={"EDGESPEC_VERIFIER": f"{dead} {address}"})
    assert (result.exit_code, result.stdout) == (0, text())
    path = tmp_path / "agent.yaml"
    path.write_text(f"verifier: [{dead}, {address}]\nassociation: random\n")
    result = generate("--config", str(path))
    assert (result.exit_code, result.stdout) == (0, text())
    assert f"using {address} (random)" in result.stderr


def test_a_learned_association_is_read_from_its_file(
    address: str, dead: str, tmp_path: Path
) -> None:
    path = tmp_path / "learned.json"
    layer = {"weights": [[0.0] * len(FEATURES)], "bias": [0.0]}
    path.write_text(json.dumps({"version": 1, "features": FEATURES, "layers": [layer]}))
    both = ("--verifier", dead, "--verifier", address)
    result = generate(*both, "--set", f"association=learned:{path}")
    assert (result.exit_code, result.stdout) == (0, text())
    assert f"using {address} (learned)" in result.stderr
    path.write_text("{}")
    result = generate(*both, "--set", f"association=learned:{path}")
    assert result.exit_code == 1
    assert f"error: {path}: association weights of version None" in result.stderr


def test_none_there_says_so_for_each_and_how_to_start_one(dead: str) -> None:
    other = "127.0.0.1:1"
    result = generate("--verifier", dead, "--verifier", other)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: none of 2 verifiers can be used" in result.stderr
    for words in (f"  {dead}: ", f"  {other}: ", "start one:   edgespec verifier"):
        assert words in result.stderr


def test_doctor_asks_each(address: str, dead: str) -> None:
    arguments = ["doctor", "--verifier", address, "--verifier", dead]
    shown = CliRunner().invoke(app, arguments).stdout
    assert f"verifier at {address}: serves toy" in shown
    assert f"verifier at {dead}: " in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"verifier": ()}, r"verifier has 0 addresses, not 1 to 64"),
        ({"verifier": ("a:1", "http://b:2")}, r"verifier is 'http://b:2', but must be host:port"),
        ({"verifier": ("a:1", "")}, r"verifier is empty"),
        ({"verifier": [1]}, r"verifier is 1, but must be text"),
        ({"association": "nearest"}, r"association is 'nearest', but must be one of random, "),
    ],
)
def test_addresses_are_checked(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(AgentConfig, None, given)


async def test_the_others_are_ranked_and_those_that_did_not_answer_come_last() -> None:
    refusing = LoopbackTransport(echo, told)
    refusing.refuse("nobody home")
    pass_us = {"slow": 90_000, "fast": 10_000, "mid": 50_000}
    links: dict[str, Transport] = {"refusing": refusing}
    links |= {name: transport(told(pass_us=one)) for name, one in pass_us.items()}
    async with closing(links):
        choice = await choose_verifier(links, MostCompute(), DEVICE)
    assert (choice.chosen.address, choice.others) == ("fast", ("mid", "slow", "refusing"))


async def test_a_command_keeps_the_others_for_when_the_chosen_one_fails() -> None:
    other = VerifierConfig(model="toy", name="other", port=0)
    async with serving() as (one, _), serving() as (two, _), serving(config=other) as (wrong, _):
        dead = "127.0.0.1:1"
        given = AgentConfig((dead, wrong, one, two), model="toy", draft=DraftSection("toy"))
        config, info = await greet(given)
    assert (info.name, config.association) == ("toy", "listed")
    assert set(config.verifiers[:2]) == {one, two}
    assert config.verifiers[2:] == (dead,)


def test_the_summary_says_who_served(address: str, dead: str) -> None:
    result = generate("--verifier", dead, "--verifier", address, "--stats")
    assert result.exit_code == 0
    assert f"served by {address}; 0 failovers" in result.stderr
    alone = generate("--verifier", address, "--stats")
    assert "served by" not in alone.stderr


async def test_an_agent_of_several_chooses_by_itself(address: str, dead: str) -> None:
    params = SamplingParams(max_tokens=16)
    async with edgespec_connect([dead, address], draft="toy") as agent:
        ids = [one async for chunk in agent.generate(PROMPT, params) for one in chunk.tokens]
        assert agent.stats is not None
        assert agent.stats.verifiers == (address,)
    assert ids == toy_text(ToyTokenizer().encode(PROMPT), params)


def test_the_key_goes_to_none_of_several_that_others_could_listen_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", "word")
    with pytest.raises(ConfigError, match="the key for gpu-box:7420 would be sent without TLS"):
        build_agent(AgentConfig(("127.0.0.1", "gpu-box"), draft=DraftSection("toy")))


def test_failover_is_configured_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("failover: {hedge_s: 0.5, breaker: {failures: 3}}\n")
    config = load_config(AgentConfig, path)
    assert (config.failover.hedge_s, config.failover.breaker.failures) == (0.5, 3)
    path.write_text("failover: {hedge_s: 0}\n")
    with pytest.raises(ConfigError, match=r"hedge_s is 0.0, but must be in \[0.001, 3600.0\]"):
        load_config(AgentConfig, path)

"""Tests of commands in this process: what they print, refuse and return, chunks on a terminal and
in a pipe, statistics of drafts, and the output for a first-time user. Oracle: the toy's text; bytes
and numbers computed by hand."""

from __future__ import annotations

import io
import json
import re
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from edgespec.bench.measurement import Measurement
from edgespec.cli import doctor as checks
from edgespec.cli import generate as generate_command
from edgespec.cli.demo import print_report
from edgespec.cli.device import (
    JsonView,
    ReceivedTokens,
    TextView,
    describe_generation,
    with_bundled_sampling,
)
from edgespec.cli.doctor import Check, State
from edgespec.cli.main import COMMANDS, app
from edgespec.cli.options import documented_keys
from edgespec.cli.verifier import _can_chat, next_command
from edgespec.config import AgentConfig, VerifierConfig, load_config
from edgespec.config.common import SetupError
from edgespec.config.groups import Group
from edgespec.core.device.events import DraftCounters, TokenKind
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Chunk, Piece
from edgespec.device.build import with_model_sampling
from edgespec.models import onnx_packages
from edgespec.models.folders import ModelFolderError
from edgespec.models.toy import ToyTokenizer, toy_info
from edgespec.telemetry.recording import read_recording
from edgespec.verifier.build import load_target
from edgespec_sim.commands.main import app as simulator
from tests.kit.live_verifier import run_command, toy_text
from tests.kit.tiny_checkpoints import write_checkpoint

PROMPT = "once upon a time"
COUNT = 24
WITHIN_S = 60.0
TEXT = ToyTokenizer()


def generate(address: str, *arguments: object, stdin: str | bytes | None = None) -> Result:
    where = ("--verifier", address, "--draft", "toy", "-n", COUNT)
    return run_command("generate", *where, *arguments, stdin=stdin)


def chat(address: str, *lines: str) -> Result:
    """Hold a conversation and require that it ends without an error."""
    where = ("--verifier", address, "--draft", "toy", "-n", COUNT)
    result = run_command("chat", *where, stdin="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result


def expected_reply(prompt: str = PROMPT, **params: object) -> str:
    sampling = SamplingParams(max_tokens=COUNT, **params)  # type: ignore[arg-type]
    return TEXT.decode(toy_text(TEXT.encode(prompt), sampling))


def test_only_the_text_goes_to_stdout(address: str) -> None:
    result = generate(address, PROMPT, "--stats")
    assert (result.exit_code, result.stdout) == (0, expected_reply() + "\n")
    assert f"{COUNT} tokens in" in result.stderr
    assert "acceptance" in result.stderr


def test_a_prompt_from_stdin(address: str) -> None:
    assert generate(address, "-", stdin=PROMPT).stdout == expected_reply() + "\n"


def test_sampling_options_reach_the_target(address: str) -> None:
    given = (
        *("-t", "0.8", "--seed", "5", "--set", "sampling.top_k=9", "--set", "sampling.min_p=0.01"),
        *("--set", "sampling.logit_bias={3: -9}"),
    )
    result = generate(address, PROMPT, *given, "--set", "sampling.ignore_eos=true")
    text = expected_reply(
        temperature=0.8, top_k=9, min_p=0.01, seed=5, logit_bias={3: -9.0}, ignore_eos=True
    )
    assert result.stdout == text + "\n"


def test_json_lines(address: str) -> None:
    shown = generate(address, PROMPT, "--json", "--set", "policy.run_ahead=never").stdout
    lines = [json.loads(line) for line in shown.splitlines()]
    assert "".join(line["text"] for line in lines) == expected_reply()
    assert lines[-1]["finish"] == "length"
    assert lines[0]["position"] == len(PROMPT)
    kinds = {piece["kind"] for line in lines for piece in line["pieces"]}
    assert "accepted" in kinds


MISTAKES = (Path(__file__).parent / "mistakes.txt").read_text(encoding="utf-8")
PROGRAMS = {"edgespec": app, "edgespec-sim": simulator}


@pytest.mark.parametrize("mistake", re.findall(r"^[12] .*$", MISTAKES, re.MULTILINE))
def test_a_mistake_is_one_clear_line(mistake: str, address: str) -> None:
    head, _, said = mistake.partition(" => ")
    code, program, words = head.split(maxsplit=2)
    words = re.sub(r"@(.)\*(\d+)", lambda found: found[1] * int(found[2]), words)
    words = words.replace("TOYS", "--model toy --draft toy")
    words = words.replace("DEVICE", f"--verifier {address} --draft toy -n {COUNT}")
    result = CliRunner().invoke(PROGRAMS[program], shlex.split(words))
    assert (result.exit_code, result.stdout) == (int(code), "")
    assert re.fullmatch(rf"error: .*{re.escape(said)}.*\n", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("generate --policy pearl a", "--policy; use --set policy.name=VALUE"),
        ("generate --top-k=5 a", "--top-k; use --set sampling.top_k=VALUE"),
        ("generate --print-config a", "--print-config; use --help-all"),
        ("chat --no-ignore-eos", "--no-ignore-eos; use --set sampling.ignore_eos=VALUE"),
        ("serve --window 5", "--window; use --set draft.window=VALUE or --set policy.window=VALUE"),
        ("verifier --max-sessions 5", "--max-sessions; use --set limits.max_sessions=VALUE"),
        ("generate --nonsense a", "--nonsense"),
    ],
)
def test_an_option_that_is_a_key_is_answered_with_the_key(words: str, instead: str) -> None:
    result = CliRunner().invoke(app, shlex.split(words), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert f"No such option: {instead}" in " ".join(result.stderr.split())


def test_a_prompt_that_is_no_text_or_too_long_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = generate(address, "-", stdin=b"caf\xe9")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "stdin: is not UTF-8: " in result.stderr
    monkeypatch.setattr(generate_command, "MAX_PROMPT_BYTES", 5)
    assert generate(address, "-", stdin="é" * 2).exit_code == 0
    result = generate(address, "-", stdin="é" * 3)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "stdin: more than 5 bytes" in result.stderr


def test_no_verifier_there_says_how_to_start_one(dead: str) -> None:
    result = generate(dead, PROMPT)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"edgespec verifier --port {dead.rpartition(':')[2]}" in result.stderr


def test_a_name_without_an_address_is_no_reason_to_start_a_verifier() -> None:
    result = generate("nosuch.invalid:7420", PROMPT).stderr
    assert result.startswith("error: the host name 'nosuch.invalid' cannot be resolved\n")
    assert "edgespec verifier" not in result


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("verifier", "--model", "toy"), "Address already in use"),
        (("serve", "--draft", "no/such"), "choose another with --port"),
    ],
)
def test_a_port_in_use_is_said_before_a_model_is_loaded(
    command: tuple[str, ...], said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_command(*command, "--port", port)
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert said in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.parametrize("command", ["verifier", "generate", "chat", "serve"])
def test_help_all_explains_every_key_and_reads_back(command: str, tmp_path: Path) -> None:
    first = run_command(command, "--help-all", "--set", "log_level=error")
    assert first.exit_code == 0
    assert yaml.safe_load(first.stdout)["log_level"] == "error"
    path = tmp_path / "config.yaml"
    path.write_text(first.stdout)
    assert run_command(command, "--config", str(path), "--help-all").stdout == first.stdout
    kind: Any = VerifierConfig if command == "verifier" else AgentConfig
    assert load_config(kind, path) == kind(log_level="error")
    flag = " (--log-level)" if command == "verifier" else ""
    about = f"logged: debug, info, warning or error.{flag}\nlog_level: error\n"
    assert " ".join(about.split()) in " ".join(first.stdout.replace("\n#", " ").split())


@pytest.mark.parametrize(
    ("kind", "key", "group"),
    [
        (AgentConfig, "draft.model", Group.STABLE),
        (AgentConfig, "draft.window", Group.ADVANCED),
        (AgentConfig, "draft.draft_ms", Group.EMULATION),
        (AgentConfig, "policy.name", Group.ADVANCED),
        (AgentConfig, "failover.breaker.failures", Group.ADVANCED),
        (AgentConfig, "link.rtt_ms", Group.EMULATION),
        (VerifierConfig, "limits.kv_budget", Group.STABLE),
        (VerifierConfig, "limits.lease_s", Group.ADVANCED),
        (VerifierConfig, "pacing.row_ms", Group.EMULATION),
    ],
)
def test_a_key_has_the_group_of_its_field_or_of_its_section(
    kind: type[Any], key: str, group: Group
) -> None:
    assert documented_keys(kind)[key].group is group


@pytest.mark.parametrize("command", ["", "generate", "chat", "verifier", "serve", "keys add"])
def test_help_on_a_narrow_terminal_cuts_no_word(command: str) -> None:
    """All options of the wide help stand whole in the narrow one, whose lines fit."""
    shown = {
        columns: CliRunner().invoke(
            app, [*command.split(), "--help"], env={"COLUMNS": str(columns), "NO_COLOR": "1"}
        )
        for columns in (40, 59, 60, 250)
    }
    assert {one.exit_code for one in shown.values()} == {0}
    wanted = set(re.findall(r"│ +(--[a-z-]+)", shown[250].stdout))
    for columns in (40, 59):
        narrow = shown[columns].stdout
        assert wanted <= set(re.findall(r"--[a-z-]+", narrow))
        assert not re.search(r"…|│|\[/|\[dim", narrow)
    for columns, one in shown.items():
        assert max(map(len, one.stdout.splitlines())) <= columns


def test_help_of_all_commands_breaks_lines_where_the_terminal_ends() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    words = " ".join(result.stdout.split())
    assert "on the verifier accepts or corrects them." in words
    first = next(line for line in result.stdout.splitlines() if "A small draft model" in line)
    assert len(first.rstrip()) > 70


def test_help_shows_advanced_and_emulation_apart() -> None:
    """Each option stands below the title of its panel."""
    for command, option, title in (
        ("verifier", "--pass-ms", "Emulation"),
        ("generate", "--draft-window", "Advanced"),
        ("generate", "--draft-corpus", "Drafting"),
    ):
        above = run_command(command, "--help").stdout.partition(option)[0]
        assert re.findall(r"─ (\w+) ─", above)[-1] == title


@pytest.mark.parametrize("command", ["", *COMMANDS, "plan memory", "certs server", "keys add"])
def test_help_names_no_type_of_python(command: str) -> None:
    """A metavar is a word such as N or FILE."""
    result = run_command(*command.split(), "--help")
    assert result.exit_code == 0
    assert not re.search(r"<(bool|str|int|float|list\[\w+\])>", result.stdout)


def test_a_policy_for_comparison_says_so() -> None:
    text = documented_keys(AgentConfig)["policy.name"].text
    assert "exist for comparison only: windowed" in text
    assert run_command("generate", "--set", "policy.name=windowed", "--help-all").exit_code == 0


def test_the_environment_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("verifier: a:1\n")
    monkeypatch.setenv("EDGESPEC_VERIFIER", "b:2")
    shown = yaml.safe_load(run_command("generate", "-c", str(path), "--help-all").stdout)
    assert shown["verifier"] == "b:2"
    given = ("--verifier", "c:3", "--help-all")
    assert (
        yaml.safe_load(run_command("generate", "-c", str(path), *given).stdout)["verifier"] == "c:3"
    )


def test_chat_keeps_the_conversation(address: str) -> None:
    """The second reply follows from the whole conversation, in the tokenizer's chat format."""
    result = chat(address, "hello", "again", "/stats", "/foo", "/reset", "/quit")
    first = expected_reply("hello ")
    second = expected_reply(f"hello {first} again ")
    assert result.stdout.replace("> ", "") == f"{first}\n{second}\n"
    assert "unknown command '/foo'" in result.stderr
    assert f"{COUNT} tokens in" in result.stderr
    assert "this is a new conversation" in result.stderr


def test_chat_expects_a_file_for_one_reply(address: str, tmp_path: Path) -> None:
    """The reply is the target's own, whatever is predicted."""
    path, binary = tmp_path / "reply.txt", tmp_path / "binary"
    first = expected_reply("hello ")
    path.write_text(first)
    binary.write_bytes(b"\xff\xfe\x00")
    lines = ("/predict", f"/predict {tmp_path / 'gone'}", f"/predict {binary}", f"/predict {path}")
    result = chat(address, *lines, "/predict", "hello", "/predict", "/predict -")
    assert result.stdout.replace("> ", "") == f"{first}\n"
    shown = [line for line in result.stderr.splitlines() if "expected to be like" in line]
    none = "no prediction: the next reply is not expected to be like any file"
    found = f"the next reply is expected to be like {path} ({len(first)} characters)"
    assert [line.removeprefix("> ") for line in shown] == [none, found, found, none, none]
    assert f"error: {tmp_path / 'gone'}: no prediction: No such file" in result.stderr
    assert f"error: {binary}: no prediction: is not UTF-8 text" in result.stderr


@pytest.mark.parametrize(
    ("size", "why"),
    [
        pytest.param(
            (1 << 16) + 1,
            "the prediction has 65,537 tokens, but may have at most 65,536",
            id="tokens",
        ),
        pytest.param(
            (1 << 20) + 1,
            "the prediction has 1,048,577 characters, but may have at most 1,048,576",
            id="characters",
        ),
        pytest.param((16 << 20) + 1, "16777217 bytes, but at most 16777216 are read", id="bytes"),
    ],
)
def test_chat_refuses_a_prediction_beyond_its_bounds_and_keeps_the_one_before(
    address: str, tmp_path: Path, size: int, why: str
) -> None:
    large, small = tmp_path / "large.txt", tmp_path / "small.txt"
    large.write_text("a" * size)
    small.write_text("abc")
    result = chat(address, f"/predict {small}", f"/predict {large}", "/predict", "hello")
    assert f"error: {large}: no prediction: {why}" in result.stderr
    kept = f"the next reply is expected to be like {small} (3 characters)"
    assert result.stderr.count(kept) == 2
    assert expected_reply("hello ") in result.stdout


def test_a_folder_is_no_prediction(address: str, tmp_path: Path) -> None:
    assert "no prediction: Is a directory" in chat(address, f"/predict {tmp_path}").stderr


def test_chat_has_a_system_message_and_files(address: str, tmp_path: Path) -> None:
    """Without a terminal the chat keeps nothing but requested files."""
    saved = tmp_path / "talk.json"
    lines = ["/system be brief", "hello", "/save ~nobody-here/talk", f"/save {saved}", "/reset"]
    result = chat(address, *lines, f"/load {saved}", "again", "/model")
    first = expected_reply("be brief hello ")
    second = expected_reply(f"be brief hello {first} again ")
    assert result.stdout.replace("> ", "") == f"{first}\n{second}\n"
    assert "continuing a conversation of 2 messages" in result.stderr
    assert "error: ~nobody-here/talk: the system knows no such home folder" in result.stderr
    assert f"verifier  {address}" in result.stderr
    assert json.loads(saved.read_text())["system"] == "be brief"
    refused = run_command("chat", "--verifier", address, "--continue", "--no-history")
    assert refused.exit_code == 2
    assert "--continue needs the history" in refused.stderr


def test_chat_records_unless_no_history_is_kept(address: str, tmp_path: Path) -> None:
    path, command = tmp_path / "recording", ("chat", "--verifier", address, "--record")
    for arguments, texts in ((("--no-history",), 0), ((), 1)):
        result = run_command(
            *command, path, "-n", COUNT, "--draft", "toy", *arguments, stdin="hello\n"
        )
        assert result.exit_code == 0, result.output
        assert path.exists() == bool(texts)
    vocabulary = toy_info().vocabulary
    (text,) = read_recording(path, vocabulary)
    assert len(text.tokens) - text.start == COUNT


def test_chat_talks_with_the_model_it_is_told(address: str) -> None:
    result = chat(address, "/model nobody", "/model toy", "hello", "/model")
    assert "error: unknown model 'nobody'; served are 'toy'" in result.stderr
    assert "talking with toy from the next reply on" in result.stderr
    assert expected_reply("hello ") in result.stdout


def test_chat_survives_a_message_that_is_too_long(address: str) -> None:
    result = chat(address, "x" * 5000, "", "hello", "")
    kept = "(/reset makes room; an empty line sends your message again)"
    assert result.stderr.count(kept) == 2, "once as it came, once by the empty line"
    assert result.stdout.count(expected_reply("hello ")) == 1, (
        "a message with a reply is not sent again"
    )


@pytest.mark.parametrize(
    ("installed", "state", "advice"),
    [
        ({"onnxruntime": "1.23"}, "GOOD", ""),
        ({"onnxruntime-openvino": "1.24.1"}, "GOOD", ""),
        ({}, "BAD", "pip install 'edgespec[cpu]'"),
        (
            {"onnxruntime": "1", "onnxruntime-openvino": "1"},
            "BAD",
            "pip uninstall -y onnxruntime onnxruntime-openvino",
        ),
    ],
)
def test_the_doctor_sees_two_onnxruntimes(
    installed: dict[str, str], state: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "installed_version", installed.get)
    monkeypatch.setattr(onnx_packages, "installed_version", installed.get)
    found = checks.check_onnxruntime()
    assert found.state is State[state]
    assert found.advice.startswith(advice)


def test_the_doctor_asks_the_verifier(
    address: str, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow in ("check_draft_step", "check_target"):
        monkeypatch.setattr(checks, slow, lambda: Check("fine", State.GOOD, ""))
    no_session, output, deadline_s = "0 of 64 sessions", "", time.monotonic() + WITHIN_S
    # sessions of earlier tests may end late
    while no_session not in output and time.monotonic() < deadline_s:
        output = " ".join(run_command("doctor", "--verifier", address).stdout.split())
    assert f"verifier at {address}: serves toy" in output
    assert (
        f"{no_session}, each with up to 256 draft nodes (64 per pass) and a lease of 30 s" in output
    )
    result = run_command("doctor", "--verifier", dead)
    assert result.exit_code == 1
    assert f"edgespec verifier --port {dead.rpartition(':')[2]}" in result.stdout


def test_the_doctor_says_whether_texts_are_exact_here() -> None:
    found = checks.check_target()
    assert found.state is State.GOOD
    assert "the bundled target runs in float32 as canonical (row tiles of " in found.finding


# --- what a user is shown -------------------------------------------------------------------------


EVIL = "a\x1b]0;owned\x07b\n"
HARMLESS = "a\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}b\n"


def chunk(text: str, finish: FinishReason | None = None) -> Chunk:
    return Chunk(3, (1,), (Piece(text, TokenKind.DECODED),), finish)


@pytest.mark.parametrize(
    ("color", "terminal", "shown"),
    [(False, False, EVIL), (False, True, HARMLESS), (True, True, HARMLESS)],
)
def test_a_text_cannot_control_the_terminal(
    color: bool, terminal: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TextView(color, terminal)
    view.show(chunk(EVIL))
    view.end()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("finish", list(FinishReason))
def test_a_full_context_is_said_beside_the_text(
    finish: FinishReason, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TextView(color=False)
    view.show(chunk("text", finish))
    view.end()
    out, err = capsys.readouterr()
    assert out == "text\n"
    assert ("context is full" in err) == (finish is FinishReason.CONTEXT)
    progress = ReceivedTokens()
    progress.add(chunk("text", finish))
    assert f"ended by {finish.value}" in describe_generation(progress, None)
    JsonView().show(chunk("text", finish))
    assert f'"finish": "{finish.value}"' in capsys.readouterr().out


def test_another_text_is_an_error() -> None:
    plain, other = (Measurement((1, token), (0.1, 0.2), DraftCounters()) for token in (2, 3))
    with pytest.raises(SetupError, match="drafts changed the output"):
        print_report(Console(file=io.StringIO()), [plain], [other], "same prompts")


def served_model(name: str) -> ModelInfo:
    return ModelInfo(name, "v", 64, 512)


def test_the_bundled_pair_does_not_loop_unless_it_is_told_how_to_sample() -> None:
    usual = AgentConfig()
    assert with_bundled_sampling(usual, served_model("bundled")).sampling.repetition_penalty == 1.15
    assert with_bundled_sampling(usual, served_model("other")) == usual
    chosen = AgentConfig(sampling=SamplingParams(temperature=0.5))
    assert with_bundled_sampling(chosen, served_model("bundled")) == chosen


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, {}),
        ({"temperature": 0.6}, {}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "x": 1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {
                "do_sample": True,
                "temperature": None,
                "top_k": None,
                "top_p": None,
                "min_p": None,
                "repetition_penalty": None,
            },
            {"temperature": 1.0},
        ),
        ({"do_sample": True, "temperature": 0, "top_k": 5}, {"top_k": 5}),
        ({"do_sample": True, "temperature": 0.0, "top_k": 0}, {}),
        ({"do_sample": True, "top_k": -1}, {"temperature": 1.0}),
        (
            {"do_sample": None, "temperature": 0.6, "repetition_penalty": 2},
            {"repetition_penalty": 2.0},
        ),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": False, "top_k": 50, "some_new_key": (1,), "eos_token_id": (1, 2)}, {}),
    ],
)
def test_what_is_left_open_is_as_the_model_says(
    said: dict[str, object] | None, found: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    sampling = with_model_sampling(SamplingParams(seed=3), str(tmp_path))
    assert sampling == SamplingParams(seed=3, **found)  # type: ignore[arg-type]
    chosen = SamplingParams(top_p=0.5)
    assert with_model_sampling(chosen, str(tmp_path)) == chosen


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": True}, "temperature is True"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": (0.6,)}, "temperature is [0.6]"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": "many"}, "top_k is 'many'"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 7}, "top_p is 7"),
        ({"min_p": -1}, "min_p is -1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": {}}, "repetition_penalty is {}"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
    ],
)
def test_a_generation_config_that_cannot_be_is_named(
    said: dict[str, object], message: str, tmp_path: Path
) -> None:
    """The verifier refuses the file before it loads anything; a device that reads its draft's file
    does too."""
    folder = write_checkpoint(tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(said))
    for read in (
        lambda: with_model_sampling(SamplingParams(), str(folder)),
        lambda: load_target(VerifierConfig(model=str(folder))),
    ):
        with pytest.raises(ModelFolderError) as refused:
            read()
        assert str(path) in str(refused.value)
        assert message in str(refused.value)


def test_a_generation_config_beyond_its_limit_is_not_parsed(tmp_path: Path) -> None:
    path, most = tmp_path / "generation_config.json", 1 << 20
    path.write_text("{}".ljust(most))
    assert with_model_sampling(SamplingParams(), str(tmp_path)) == SamplingParams()
    path.write_text("{}".ljust(most + 1))
    with pytest.raises(ModelFolderError, match=r"1048577 bytes, but at most 1048576 are read"):
        with_model_sampling(SamplingParams(), str(tmp_path))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"model": "bundled"}, ""),
        ({"host": "0.0.0.0", "model": "bundled"}, ""),
        ({"host": "::1", "model": "bundled"}, " --verifier [::1]:7420"),
        ({"model": "toy", "port": 9}, " --verifier 127.0.0.1:9 --draft toy"),
        (
            {"host": "10.0.0.7", "model": "some/model", "port": 9},
            " --verifier 10.0.0.7:9 --draft lookup",
        ),
    ],
)
def test_a_verifier_says_what_to_type_next(given: dict[str, Any], options: str) -> None:
    config = VerifierConfig(insecure=True, **given)
    raw, question = 'edgespec generate "def fibonacci(n):"', 'edgespec chat "Why is the sky blue?"'
    assert next_command(config, config.port, can_chat=False) == raw + options
    assert next_command(config, config.port, can_chat=True) == question + options


def test_a_folder_is_asked_for_its_chat_template(tmp_path: Path) -> None:
    model = str(tmp_path)
    assert not _can_chat(model)
    (tmp_path / "config.json").write_text("{}")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text("{}")
    assert not _can_chat(model)
    (tmp_path / "chat_template.jinja").touch()
    assert _can_chat(model)
    (tmp_path / "chat_template.jinja").unlink()
    settings.write_text('{"chat_template": "{{ messages }}"}')
    assert _can_chat(model)
    assert not _can_chat("toy")

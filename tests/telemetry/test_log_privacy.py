"""Tests that no log line quotes a client's words, whatever a library puts into its errors.

Oracle: a secret word in the client's input, which must be absent from everything that was logged;
and the source, in which each log call with an exception goes through
``telemetry.logs.log_failure``.
"""

from __future__ import annotations

import ast
import json
import logging
from dataclasses import replace

import pytest

from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.failures import describe_without_messages
from edgespec.core.protocol.messages import Fault, FaultCode, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import GenerationError
from edgespec.device.drafters.toy import toy_info
from edgespec.models.grammar import as_constraint_errors
from edgespec.telemetry.logs import JsonFormatter, TextFormatter, log_failure
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.kit.letters import MODEL, READER, connect_pair
from tests.sources import ROOT

SECRET = "xylophone-of-the-client"
LOGGERS = {"logging", "log", "_log", "logger", "_logger"}


def make_error(cause: BaseException | None = None) -> ValueError:
    try:
        raise ValueError(f"cannot read {SECRET}") from cause
    except ValueError as error:
        return error


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
@pytest.mark.parametrize("may_quote", [True, False])
def test_a_failure_is_logged_with_its_places(
    formatter: logging.Formatter, may_quote: bool, caplog: pytest.LogCaptureFixture
) -> None:
    error = make_error(make_error())
    log = logging.getLogger("edgespec.test")
    log_failure(log, "reading %d failed", 7, error=error, may_quote_client=may_quote)
    shown = formatter.format(caplog.records[-1])
    assert "reading 7 failed: ValueError" in shown
    assert "in make_error" in shown
    assert (SECRET in shown) is not may_quote
    assert SECRET not in describe_without_messages(error)
    assert describe_without_messages(error).count("builtins.ValueError") == 2


def test_every_log_call_with_an_exception_leaves_its_words_out() -> None:
    """Only ``log_failure`` may use ``logger.exception``, ``exc_info`` and ``traceback``."""
    found: list[str] = []
    allowed = {"edgespec/telemetry/logs.py", "edgespec/core/protocol/failures.py"}
    for path in sorted((ROOT / "edgespec").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            whose = owner.id.lower() if isinstance(owner, ast.Name) else ""
            passes_exception = any(keyword.arg == "exc_info" for keyword in node.keywords)
            written = whose == "traceback" or (node.func.attr == "exception" and whose in LOGGERS)
            if passes_exception or written:
                found.append(f"{name}:{node.lineno}")
    assert not found


class PanicException(BaseException):  # the name that pyo3 gives it
    """An error that is not an ``Exception``, like the panics of libraries written in Rust."""


@pytest.mark.parametrize("error", [Exception(SECRET), KeyError(SECRET), PanicException(SECRET)])
def test_whatever_a_library_raises_about_a_constraint_is_the_clients_error(
    error: BaseException,
) -> None:
    with (
        pytest.raises(ConstraintError, match="grammar cannot be used") as caught,
        as_constraint_errors(ConstraintKind.GRAMMAR),
    ):
        raise error
    assert caught.value.__suppress_context__
    with pytest.raises(KeyboardInterrupt), as_constraint_errors(ConstraintKind.GRAMMAR):
        raise KeyboardInterrupt


GBNF = [f'root ::= "{SECRET}" nobody', f'rule ::= "{SECRET}"', f'root ::= "{SECRET}" (']


@pytest.mark.parametrize("text", GBNF)
async def test_a_grammar_that_cannot_be_read_is_the_clients_error_and_in_no_log(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    constraint = Constraint(ConstraintKind.GRAMMAR, text)
    async with connect_pair(READER, None) as one:
        with pytest.raises(GenerationError, match="not readable as GBNF") as caught:
            async for _ in one.generate("x", SamplingParams(constraint=constraint)):
                pass
    assert caught.value.code is FaultCode.INVALID
    assert SECRET not in logged_text(caplog)


async def test_a_reader_that_breaks_quotes_no_client(caplog: pytest.LogCaptureFixture) -> None:
    """The fault that ends a stream is logged too, and must not quote the client either."""
    caplog.set_level(logging.DEBUG)

    def broken(constraint: Constraint) -> Constraint:
        raise RuntimeError(f"bug at {constraint.text}")

    target = ToyTarget(MODEL, vocabulary=toy_info(MODEL).vocabulary)
    verifier = Verifier(target, Limits(), read_constraint=broken)
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    stream = await transport.connect()
    params = replace(SamplingParams(), constraint=Constraint(ConstraintKind.REGEX, SECRET))
    await stream.send(Open("s", "", "", (5,), sampling=params))
    said = await stream.receive()
    assert isinstance(said, Fault)
    assert said.code is FaultCode.INTERNAL
    await stream.close()
    await transport.close()
    await verifier.stop()
    assert "reading failed: RuntimeError" in logged_text(caplog)
    assert SECRET not in logged_text(caplog)


def logged_text(caplog: pytest.LogCaptureFixture) -> str:
    lines = [JsonFormatter().format(record) for record in caplog.records]
    return "\n".join([caplog.text, *(str(json.loads(line)) for line in lines)])

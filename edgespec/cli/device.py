"""The device's side of a command: choose a verifier, then stream one generation into a view."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from rich.console import Console
from rich.text import Text

from edgespec.cli.running import say, stopping_at_once
from edgespec.config import DEFAULT_PORT, AgentConfig
from edgespec.config.common import SetupError, host_of
from edgespec.config.proxies import proxy_of_address
from edgespec.core.association.known_verifiers import make_views
from edgespec.core.association.policies import Association, rank_verifiers
from edgespec.core.device.events import TokenKind
from edgespec.core.device.goodput_policy import LEAST_JUDGED as LEAST_JUDGED
from edgespec.core.device.goodput_policy import judge_draft as judge_draft
from edgespec.core.ports import LinkError, ModelInfo, UntrustedPeerError
from edgespec.core.protocol.acceptance import full_rule_name
from edgespec.core.protocol.checks import make_printable
from edgespec.core.protocol.messages import EXACT_RULE, FinishReason, VerifierInfo
from edgespec.device import build
from edgespec.device.agent import Chunk, GenerationStats
from edgespec.device.borrowed_tokenizer import takes_target_texts, with_tokenizer
from edgespec.device.connections import Connections
from edgespec.device.prober import ProbeResult, probe_all
from edgespec.models.catalogue import Side, find_pulled, read_catalogue
from edgespec.models.folders import BUNDLED

_KINDS = {
    TokenKind.ACCEPTED: ("green", "drafted on the device, accepted by the target"),
    TokenKind.REPLACED: ("yellow", "drafted on the device, kept in place of the target's own"),
    TokenKind.CORRECTED: ("bold red", "drafted wrongly, corrected by the target"),
    TokenKind.DECODED: ("", "by the target alone"),
    TokenKind.LOCAL: ("magenta", "by a model of this device, without a verifier"),
}
"""Style of a token on a terminal, and its meaning for the legend."""
_ENDINGS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length (max_tokens)",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.CONTEXT: "context (the model's context is full)",
}


class View(Protocol):
    """Output of the chunks of one generation."""

    def show(self, chunk: Chunk) -> None:
        """Show one chunk at once."""

    def end(self) -> None:
        """Finish the output, complete or not, and leave the cursor at the start of a line."""


@dataclass(slots=True)
class TextView:
    """View that writes text to stdout."""

    color: bool
    """Tokens are coloured by their kind."""
    terminal: bool = field(default_factory=lambda: sys.stdout.isatty())
    """Control characters are replaced, because stdout is a terminal that they could control."""
    _column_open: bool = False
    _context_full: bool = False

    def show(self, chunk: Chunk) -> None:
        self._context_full = chunk.finish is FinishReason.CONTEXT
        if self.color:
            console = Console(file=sys.stdout, force_terminal=True, highlight=False)
            parts = ((make_printable(p.text), _KINDS[p.kind][0]) for p in chunk.pieces)
            console.print(Text.assemble(*parts), end="", soft_wrap=True)
        else:
            sys.stdout.write(make_printable(chunk.text) if self.terminal else chunk.text)
        sys.stdout.flush()
        if chunk.text:
            self._column_open = not chunk.text.endswith("\n")

    def end(self) -> None:
        if self._column_open:
            sys.stdout.write("\n")
            sys.stdout.flush()
        if self._context_full:  # the text alone does not show it
            print("the output ends here: the model's context is full", file=sys.stderr)
        self._column_open = self._context_full = False


@dataclass(slots=True)
class JsonView:
    """View that writes one JSON object per chunk to stdout. Under a LOSSY ``rule`` the last object
    counts the tokens that were replaced."""

    rule: str = EXACT_RULE
    answered_by: str = ""
    """Model of this device that writes the text, for the last object. Empty: the target does."""
    _replaced: int = 0

    def show(self, chunk: Chunk) -> None:
        line: dict[str, Any] = {
            "position": chunk.position,
            "tokens": list(chunk.tokens),
            "text": chunk.text,
            "pieces": [{"text": p.text, "kind": p.kind.value} for p in chunk.pieces],
            "finish": chunk.finish.value if chunk.finish else None,
        }
        self._replaced += sum([one.kind is TokenKind.REPLACED for one in chunk.pieces])
        if chunk.finish and self.rule != EXACT_RULE:
            line |= {"rule": full_rule_name(self.rule), "lossy": True, "replaced": self._replaced}
        if chunk.finish and self.answered_by:
            line |= {"answered_by": self.answered_by, "lossy": True}
        if chunk.logprobs:
            line["logprobs"] = [
                {
                    "logprob": score.logprob,
                    "margin": score.margin,
                    "top": [{"token": one, "logprob": logprob} for one, logprob in score.top],
                }
                for score in chunk.logprobs
            ]
        utf8 = (sys.stdout.encoding or "utf-8").lower() in ("utf-8", "utf8")
        print(json.dumps(line, ensure_ascii=not utf8), flush=True)

    def end(self) -> None:
        return


@dataclass(slots=True)
class ReceivedTokens:
    """Tokens of one generation, with the times of their arrival."""

    started_s: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """Seconds from ``started_s`` to the arrival of each token."""
    parts: list[str] = field(default_factory=list)
    """Text of each chunk."""
    finish: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        self.finish = chunk.finish
        self.parts.append(chunk.text)
        self.tokens += chunk.tokens
        self.times_s += [time.perf_counter() - self.started_s] * len(chunk.tokens)

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after the first chunk, or None if there was no further chunk."""
        later = sum(one > self.times_s[0] for one in self.times_s)
        return (self.times_s[-1] - self.times_s[0]) / later if later else None


def should_use_color() -> bool:
    """Return whether stdout is a terminal or ``FORCE_COLOR`` is set (force-color.org), and
    ``NO_COLOR`` is not (no-color.org)."""
    wanted = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    return wanted and not os.environ.get("NO_COLOR")


def make_legend(lossy: bool = False) -> Text:
    """Return one line that explains the styles of tokens. ``lossy`` includes replaced tokens."""
    rare = {TokenKind.LOCAL} | (set() if lossy else {TokenKind.REPLACED})
    kinds = [kind for kind in TokenKind if kind not in rare]
    parts = [Text(f"{kind.value}: {_KINDS[kind][1]}", _KINDS[kind][0]) for kind in kinds]
    return Text("  ·  ").join(parts)


def describe_loss(stats: GenerationStats) -> str:
    """Return one clause about the tokens that a relaxed rule replaced."""
    replaced, committed = stats.counters.replaced, stats.counters.committed
    share = replaced / committed if committed else 0.0
    return f"LOSSY ({stats.rule}): {replaced} tokens ({share:.0%}) are not the target's own"


def report_drafting(
    received: ReceivedTokens, stats: GenerationStats | None, *, color: bool, explain: bool
) -> None:
    """Print one line on stderr about the speed, and what drafting contributed to it.

    Nothing is printed for an output that is too short to measure. ``color`` dims the line;
    ``explain`` adds the legend of the token styles."""
    per_token_s = received.per_token_s
    if stats is None or not per_token_s:
        return
    parts = [f"{1 / per_token_s:.1f} tokens per second"]
    counters, pass_s = stats.counters, stats.estimates.pass_s.get(0.0)
    if counters.accepted and pass_s:
        parts.append(
            f"{pass_s / per_token_s:.2f} times as fast as one token per pass of"
            f" {pass_s * 1e3:.0f} ms"
        )
    share = counters.accepted / counters.committed if counters.committed else 0.0
    parts.append(f"{counters.accepted} of {counters.committed} tokens ({share:.0%}) drafted here")
    if counters.predicted_sent:
        parts.append(f"{counters.predicted_accepted} of them from the prediction")
    if advice := judge_draft(counters.tried, counters.hits, stats.is_translated):
        parts.append(advice)
    if stats.is_lossy:
        parts.append(describe_loss(stats))
    console = Console(stderr=True, highlight=False)
    console.print(" · ".join(parts), style="dim" if color else "", soft_wrap=True)
    if explain:
        console.print(make_legend(stats.is_lossy), soft_wrap=True)


def describe_generation(received: ReceivedTokens, stats: GenerationStats | None) -> str:
    """Return the statistics of one generation, in two or more lines, for ``--stats``."""
    times_s = received.times_s
    lines = [f"{len(times_s)} tokens in {max(times_s, default=0.0):.2f} s"]
    if times_s:
        lines[0] += f", first after {times_s[0] * 1e3:.0f} ms"
    if (per_token_s := received.per_token_s) is not None:
        lines[0] += f", then {per_token_s * 1e3:.1f} ms per token"
    if received.finish is not None:
        lines[0] += f", ended by {_ENDINGS[received.finish]}"
    if stats is not None:
        c = stats.counters
        share = c.passes / c.committed if c.committed else 0.0
        rate = "–" if c.acceptance is None else f"{c.acceptance:.0%}"
        lines.append(
            f"accepted {c.accepted}, corrected {c.corrected}, decoded"
            f" {c.committed - c.accepted - c.corrected}; {share:.2f} passes per token;"
            f" acceptance {rate}; sent {c.sent} nodes, wasted {c.wasted};"
            f" reconnects {c.reconnects}; round trip {stats.estimates.rtt_s.get(0.0) * 1e3:.0f} ms"
        )
        if c.passes:
            pass_ms, queue_ms = 1e3 * c.verify_s / c.passes, 1e3 * c.queue_s / c.passes
            lines.append(f"a pass took {pass_ms:.1f} ms, drafts waited {queue_ms:.1f} ms for it")
        if c.predicted_sent:
            lines.append(
                f"prediction: {c.predicted_sent} nodes sent, {c.predicted_accepted} accepted,"
                f" {c.predicted_wrong} wrong"
            )
        if stats.verifiers:
            moved = f"{stats.failovers} failover{'' if stats.failovers == 1 else 's'}"
            lines.append(f"served by {', '.join(stats.verifiers)}; {moved}")
        if advice := judge_draft(c.tried, c.hits, stats.is_translated):
            lines.append(advice)
        if c.rested > c.committed // 10:
            why = f": {stats.rest_reason}" if stats.rest_reason else ""
            lines.append(f"drafting rested for {c.rested} of {c.committed} tokens{why}")
        if lead := stats.lead:
            lines.append(f"does this device's draft model help? {lead}")
        if stats.is_lossy:
            lines.append(describe_loss(stats))
        if c.draft_failure:
            lines.append(f"drafting stopped: {c.draft_failure}")
    return "\n".join(lines)


_UNRESOLVED: Final = re.compile("errors resolving|resolution failed|lookup (failed|error)", re.I)
"""Messages of gRPC for a host name that cannot be resolved."""
_WEB_SERVER: Final = re.compile("connect an http1.x server", re.I)
"""Message of gRPC for a server that speaks HTTP/1, such as ``edgespec serve``."""


async def choose_verifier(
    config: AgentConfig, connections: Connections | None = None
) -> tuple[AgentConfig, ModelInfo]:
    """Return ``config`` for the verifiers that answer and fit, and the model that they serve.

    If there are several, the chosen one is printed and comes first. The target's tokenizer and chat
    template come from it (``with_tokenizer``). A wrong address is noticed here, before the session
    would try to reconnect for some time. ``connections`` are used, or some for this call alone.
    Raises ``SetupError``, which says what to run."""
    if connections is None:
        async with Connections(config, with_texts=takes_target_texts(config)) as own:
            return await choose_verifier(config, own)
    if len(config.verifiers) > 1:
        return await _choose(config, connections)
    ((address, answer),) = (await connections.answers()).items()
    if answer.info is None:
        raise SetupError(no_verifier_message(address, answer.error or LinkError("")))
    with stopping_at_once():  # it may download a tokenizer from the Hub
        why = explain_misfit(config, answer.info, f"the verifier at {address}")
    if why:
        raise SetupError(why)
    info = answer.info.find_model(config.model) or answer.info.model
    return await _with_texts(config, info, address, connections), info


async def can_reach_verifier(connections: Connections) -> bool:
    """Return whether a verifier answers a greeting, if only with a refusal."""
    answers = (await connections.answers()).values()
    return any(one.error is None or not one.error.retryable for one in answers)


async def _with_texts(
    config: AgentConfig, info: ModelInfo, address: str, connections: Connections
) -> AgentConfig:
    """Return ``config`` with the tokenizer and chat template of the target ``info``. Raises
    ``SetupError`` if the draft does not fit them."""
    with stopping_at_once():
        config = build.with_pulled_draft(config, info, say)
    config = await with_tokenizer(config, info, say, address, connections)
    with stopping_at_once():
        build.check_draft(config, info)
    return config


async def _choose(config: AgentConfig, connections: Connections) -> tuple[AgentConfig, ModelInfo]:
    """Choose among several verifiers. The result lists those that fit, in the order of the
    association, and then those that did not answer and may come back. All that fit have the
    vocabulary of the first one."""
    answers = await _timed_answers(connections)
    with stopping_at_once():
        whys = {
            address: one.why if one.info is None else explain_misfit(config, one.info, "it")
            for address, one in answers.items()
        }
    left_out = {address: why for address, why in whys.items() if why is not None}
    policy, found = config.association, config
    while True:
        order, info, rtt_s = _rank_addresses(config, answers, left_out)
        model = info.find_model(config.model) or info.model
        try:
            found = await _with_texts(config, model, order[0], connections)
            break
        except SetupError as error:  # another verifier may fit
            left_out[order[0]] = str(error)
    for address in order[1:]:
        other = answers[address].info
        why = None if other is None else explain_misfit(found, other, "it")
        if why is not None:
            left_out[address] = why
    order = [address for address in order if address not in left_out]
    _say_left_out(left_out)
    unanswered = [address for address in left_out if answers[address].info is None]
    found = replace(found, verifier=(*order, *unanswered))
    if policy is Association.RENDEZVOUS:
        count = len(found.verifiers)
        say(f"using {count} replicas ({policy.value}): each conversation stays at one of them")
        return found, model
    passes = f", pass {info.pass_us / 1e3:.1f} ms" if info.pass_us else ""
    say(
        f"using {order[0]} ({policy.value}): round trip {rtt_s * 1e3:.1f} ms{passes},"
        f" {info.sessions} of {info.max_sessions} sessions"
    )
    return replace(found, association=Association.LISTED), model


def report_left_out(config: AgentConfig, connections: Connections) -> None:
    """Print which of several verifiers were not used, and why, after an output of ``config`` that
    waited for none of their answers."""
    if len(config.verifiers) < 2:
        return
    left_out = dict[str, str]()
    for address, answer in connections.answers_so_far().items():
        why: str | None = answer.why
        if answer.info is not None:
            with stopping_at_once():
                why = explain_misfit(config, answer.info, "it")
        if why is not None:
            left_out[address] = why
    _say_left_out(left_out)


def _say_left_out(left_out: Mapping[str, str]) -> None:
    """Print the verifiers that are not used, each with the reason."""
    if left_out:
        say("not used: " + "; ".join(f"{address} ({why})" for address, why in left_out.items()))


async def _timed_answers(connections: Connections) -> dict[str, ProbeResult]:
    """Return the answers of all verifiers, with the round trips to each that answered the
    greeting. It is measured by a second call, since the first one also connects."""
    answers = await connections.answers()
    links = {
        address: connections.lease(address)
        for address, one in answers.items()
        if one.info is not None
    }
    try:
        return answers | await probe_all(links)
    finally:
        await asyncio.gather(*(one.close() for one in links.values()))


def _rank_addresses(
    config: AgentConfig, answers: Mapping[str, ProbeResult], left_out: Mapping[str, str]
) -> tuple[list[str], VerifierInfo, float]:
    """Return the addresses that are not left out, best first, and the description and round trip in
    seconds of the best one. Raises ``SetupError`` if none is left."""
    fits = {address: one for address, one in answers.items() if address not in left_out}
    if not fits:
        lines = [f"none of {len(left_out)} verifiers can be used"]
        for address, why in left_out.items():
            lines.append(f"  {address}: {why.removeprefix(f'verifier at {address}: ')}")
        lines += [f"  start one:           {_start_command(str(DEFAULT_PORT))}"]
        lines += ["  or name another one: --verifier HOST:PORT, or EDGESPEC_VERIFIER"]
        raise SetupError("\n".join(lines))
    known = [
        (address, one.info, None if one.info is None else one.info.sessions, one.rtt_s)
        for address, one in fits.items()
    ]
    order = list(rank_verifiers(config.association, "", make_views(known)))
    best = fits[order[0]]
    assert best.info is not None
    return order, best.info, best.rtt_s or 0.0


def explain_misfit(config: AgentConfig, verifier: VerifierInfo, subject: str) -> str | None:
    """Return why ``config`` cannot use this verifier, or None.

    None does not mean that it can, if the target's tokenizer is still to be fetched: then the check
    follows. ``subject`` is what the message calls the verifier."""
    if (info := verifier.find_model(config.model)) is None:
        known = ", ".join(repr(one.name) for one in verifier.models)
        return f"unknown model {config.model!r}: {subject} serves {known}"
    if takes_target_texts(config):
        return None
    reference = build.tokenizer_reference(config)
    own = build.vocabulary_of(reference)
    if own != info.vocabulary:
        return (
            f"the tokenizer of {reference!r} (vocabulary {own}) is not that of the"
            f" verifier's {info.name!r} (vocabulary {info.vocabulary}); choose a --draft that"
            " shares it, or give the target's tokenizer: --set tokenizer=FOLDER"
        )
    return None


def with_bundled_sampling(config: AgentConfig, info: ModelInfo) -> AgentConfig:
    """Return ``config``, for the bundled target with that model's own sampling defaults.

    The bundled target is so small that greedy decoding repeats itself. Parameters that the user
    chose stay. On a terminal a line explains what the bundled pair is."""
    if info.name != BUNDLED:
        return config
    if sys.stderr.isatty():
        say("bundled is a tiny pair of models for trying edgespec out; its text makes little sense")
    return replace(
        config,
        sampling=build.with_model_sampling(config.sampling, build.tokenizer_reference(config)),
    )


def check_prompt(tokens: Sequence[int], info: ModelInfo) -> None:
    """Raise ``SetupError`` if a prompt fills the context, so that no output is possible."""
    if len(tokens) >= info.context_length:
        raise SetupError(
            f"the prompt has {len(tokens)} tokens, which leaves no room for output in the context"
            f" of {info.context_length} tokens of {info.name!r}; shorten it"
        )


def no_verifier_message(address: str, error: LinkError) -> str:
    """Return the error message for a verifier that does not answer or refuses this device."""
    if isinstance(error, UntrustedPeerError) or not error.retryable:
        return str(error)
    host, _, port = build.with_port(address).rpartition(":")
    message = f"no verifier answers at {build.with_port(address)}"
    if (proxy := proxy_of_address(build.with_port(address))) is not None:
        return f"{message} {proxy.explain(host_of(build.with_port(address)))}\n  ({error})"
    if _UNRESOLVED.search(str(error)):
        message = f"the host name {host!r} cannot be resolved"
        advice = "correct the address:"
    elif _WEB_SERVER.search(str(error)):
        message = f"a web server answers at {build.with_port(address)}, not a verifier"
        message += (
            f"\n  `edgespec serve` may listen there; a verifier's usual port is {DEFAULT_PORT}"
        )
        advice = "correct the address:"
    else:
        message += f"\n  start one:           {_start_command(port)}"
        message += '\n  or let it load:      it answers when it has printed its line with "ready"'
        advice = "or name another one:"
    return f"{message}\n  {advice} --verifier HOST:PORT, or EDGESPEC_VERIFIER\n  ({error})"


def _start_command(port: str) -> str:
    """Return the command that starts a verifier at ``port``. It names the first target that was
    pulled to this machine, since a verifier without ``--model`` serves the bundled toy."""
    names = (name for name in read_catalogue() if find_pulled(name, Side.TARGET) is not None)
    model = f" --model {name}" if (name := next(names, "")) else ""
    option = "" if port == str(DEFAULT_PORT) else f" --port {port}"
    return f"edgespec verifier{model}{option}"


async def stream(
    generation: AsyncGenerator[Chunk, None], view: View, received: ReceivedTokens | None = None
) -> ReceivedTokens:
    """Run a generation, show its chunks in ``view``, and return the tokens received.

    ``view.end`` is called whatever happens. A caller that passes ``received`` finds there the
    tokens of a generation that was cut short, too."""
    received = received or ReceivedTokens()
    try:
        async with aclosing(generation) as chunks:
            async for chunk in chunks:
                received.add(chunk)
                view.show(chunk)
    finally:
        view.end()
    return received

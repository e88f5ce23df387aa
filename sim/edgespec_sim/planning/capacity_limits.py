"""Which term forbids an objective, whatever the number of verifiers?

A request that has a verifier to itself waits for links, draft steps and passes, and no further
verifier shortens any of them. The lower bounds of ``bounds.py`` say what no policy of the arm can
go below; where an objective lies between the bound and what the arm attains alone, the parts of a
round are told.
"""

from __future__ import annotations

from edgespec.bench.arms import Arm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.planning.bounds import lower_bounds
from edgespec_sim.planning.capacity_values import CapacityQuestion, Predicted
from edgespec_sim.scenario.costs import Operation, law_of, measured
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.network import Network
from edgespec_sim.world.run import token_source


def why_never(question: CapacityQuestion, arm: Arm, alone: Predicted) -> str:
    """``alone``: of so many verifiers that hardly two requests meet."""
    slo = question.slo
    if not alone.within:
        return (
            f"even {alone.verifiers} verifiers are too few for this load: each would have"
            f" {alone.active:.0f} requests at once"
        )
    parts = []
    if alone.tpot_p95_s > slo.tpot_s:
        parts.append(_tpot(question, arm, alone))
    if alone.ttft_p95_s > slo.ttft_s:
        parts.append(_ttft(question, alone))
    return "; ".join(parts)


def _tpot(question: CapacityQuestion, arm: Arm, alone: Predicted) -> str:
    scenario = question.scenario
    rtt_s, step_s, pass_s = _costs(question)
    said = (
        f"TPOT p95 is to be {_ms(question.slo.tpot_s)} at most, but is {_ms(alone.tpot_p95_s)} for"
        " requests that have a verifier to themselves: "
    )
    acceptance = _acceptance(question)
    bounds = lower_bounds(
        arm.value, rtt_s=rtt_s, step_s=step_s, pass_s=pass_s, acceptance=acceptance
    )
    name, bound_s = max(bounds.items(), key=lambda one: one[1])
    passes = measured(scenario.verifiers[question.kind].pass_time)
    terms = {
        f"a round trip {_ms(rtt_s)}": rtt_s if arm.drafts else 0.0,
        f"a draft step {_ms(step_s)}": step_s if arm.drafts else 0.0,
        f"a pass {_ms(pass_s)}, {passes}": pass_s,
    }
    listed = ", ".join(text for text, term_s in terms.items() if term_s)
    if bound_s > question.slo.tpot_s:
        return f"{said}the bound '{name}' alone is {_ms(bound_s)} on the mean ({listed})"
    longest = max(terms, key=lambda text: terms[text])
    return (
        f"{said}at {acceptance:.0%} of first guesses right a miss costs {listed}; the longest is"
        f" {longest.partition(',')[0]}"
    )


def _ttft(question: CapacityQuestion, alone: Predicted) -> str:
    scenario = question.scenario
    rtt_s, _, _ = _costs(question)
    law = law_of(
        scenario.verifiers[question.kind].pass_time, Operation.TARGET_PASS, question.folder
    )
    prompt = max(section.workload.prompt_tokens for section in scenario.devices.values())
    prompt_s = law.seconds(max(1, prompt))
    terms = {
        f"connecting, a round trip of {_ms(rtt_s)}": rtt_s,
        f"the prompt and its answer, a round trip of {_ms(rtt_s)}": rtt_s,
        f"a pass over {prompt} prompt tokens, {_ms(prompt_s)}": prompt_s,
    }
    longest = max(terms, key=lambda text: terms[text])
    return (
        f"TTFT p95 is to be {_ms(question.slo.ttft_s)} at most, but is {_ms(alone.ttft_p95_s)} for"
        f" requests that have a verifier to themselves: {'; '.join(terms)}. The longest is"
        f" {longest}"
    )


def _costs(question: CapacityQuestion) -> tuple[float, float, float]:
    """The slowest group's usual round trip and draft step, and a pass of one row."""
    scenario: Scenario = question.scenario
    network = Network(EventQueue(), scenario, "limits", question.folder)
    verifier = scenario.verifier_name(question.kind, 0)
    rtt_s = max(network.view(group, 0, verifier).rtt_s for group in scenario.devices)
    step_s = max(
        law_of(section.draft, Operation.DRAFT_STEP, question.folder).seconds(1)
        for section in scenario.devices.values()
    )
    section = scenario.verifiers[question.kind]
    pass_s = law_of(section.pass_time, Operation.TARGET_PASS, question.folder).seconds(1)
    return rtt_s, step_s, pass_s


def _acceptance(question: CapacityQuestion) -> float:
    given = question.scenario.tokens.acceptance
    if given is not None:
        return given
    law = getattr(token_source(question.scenario, question.seed, question.folder), "law", None)
    return float(law.acceptance()) if law is not None else 0.7


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.1f} ms"

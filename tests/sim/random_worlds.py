"""Options of a random world from one seed, over every policy, drafter, law, bound and fault.

The suite plays a few thousand worlds, ``benchmarks/many_worlds.py`` plays ``--worlds``.
"""

from __future__ import annotations

import random
from dataclasses import replace

from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.ports import Drafter
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.prefix_store import block_bytes
from edgespec.device.drafters.toy import RandomDrafter, ToyDrafter, toy_info
from tests.adversarial import AdversarialDrafter
from tests.sim.faults import checks, worlds

# Mutants are tested on worlds below this seed, so that they are found as early as before. From this
# seed on devices run as users run them, some short of memory.
GOVERNED_FROM = 10_000
REPLAY = 'PYTHONPATH=.:sim python -c "from tests.sim.random_worlds import {name}; {name}({seed})"'


def exact_drafter(model: ToyModel) -> Drafter:
    return ToyDrafter(model)


def random_drafter(model: ToyModel) -> Drafter:
    return RandomDrafter(toy_info(model))


def adversarial_drafter(model: ToyModel) -> Drafter:
    return AdversarialDrafter(ToyDrafter(model))


DRAFTERS: tuple[worlds.DrafterFactory, ...] = (
    exact_drafter,
    worlds.good_drafter,
    worlds.good_drafter,
    random_drafter,
    adversarial_drafter,
)


def play(seed: int) -> worlds.WorldResult:
    """Play the world of a seed. Raises any violation in it."""
    return worlds.run_world(draw_options(seed), seed)


def play_with_prediction(seed: int) -> worlds.WorldResult:
    """Play a small world of a seed in which devices have predictions. Raises any violation."""
    return worlds.run_world(draw_with_prediction(seed), seed)


def draw_with_prediction(seed: int) -> worlds.WorldOptions:
    """Return options of a world with one or two devices, which have predictions and mostly no
    draft model, and a verifier that mostly has none. So a world is cheap, and every event of it may
    meet a prediction."""
    dice = random.Random(f"small world of {seed}")
    options = draw_options(GOVERNED_FROM + seed)
    limits = options.limits
    if dice.random() < 0.7:  # room for whole predictions
        limits = replace(limits, max_nodes_outstanding=128, max_nodes_per_pass=dice.choice((4, 64)))
    sampling = options.sampling
    if sampling.max_tokens > 2:
        sampling = replace(sampling, max_tokens=dice.choice((20, 30, 60)), min_tokens=0)
    options = replace(
        options,
        policies=options.policies[: dice.choice((1, 1, 1, 2))],
        prediction=dice.choice((*worlds.PredictionKind,)),
        draft_context_length=dice.choice((0, 0, 0, options.draft_context_length)),
        device_text=dice.random() < 0.3,
        drafting=True,
        resident_bytes=None,
        sampling=sampling,
        limits=limits,
    )
    if dice.random() < 0.7:
        engine_limits = replace(options.engine_limits, drafter=False)
        options = replace(options, engine_limits=engine_limits, server_drafter=None)
    return options


def draw_options(seed: int) -> worlds.WorldOptions:
    options = _with_server_drafts(_draw_options(seed), random.Random(f"server drafts of {seed}"))
    options = _with_server_drafter(options, random.Random(f"server drafter of {seed}"))
    options = _with_named_prefixes(options, random.Random(f"named prefixes of {seed}"))
    if seed < GOVERNED_FROM:
        return options
    options = _with_conditions(options, random.Random(f"conditions of {seed}"))
    options = _as_users_run_it(options, random.Random(f"goodput of {seed}"))
    return _with_predictions(options, random.Random(f"predictions of {seed}"))


def _with_predictions(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Give the devices of a third of the worlds predictions, right or wrong in every way, and leave
    out the draft model here and there."""
    if dice.random() >= 0.33:
        return options
    context_length = 0 if dice.random() < 0.3 else options.draft_context_length
    return replace(
        options,
        prediction=dice.choice(tuple(worlds.PredictionKind)),
        draft_context_length=context_length,
    )


def _as_users_run_it(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Let most devices use the default policy, which weighs their steps, and many also draft from
    the text."""
    policies = tuple(
        GoodputPolicy(dice.choice((1, 2, 2, checks.WIDEST)), window=dice.choice((None, None, 1, 4)))
        if dice.random() < 0.7
        else policy
        for policy in options.policies
    )
    return replace(options, policies=policies, device_text=dice.random() < 0.5)


def _with_conditions(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Make some devices short of memory; the shortage changes every fifth of a second."""
    held = [
        dice.choice((0, 0, worlds.BUDGET // 2, worlds.BUDGET - 80 * 1024, worlds.BUDGET))
        for _ in range(8)
    ]
    kind = dice.randrange(6)
    if kind in (0, 1, 2):
        options = replace(options, resident_bytes=lambda now: held[int(5 * now) % len(held)])
    return options


def _with_server_drafts(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Let most verifiers draft by lookup too; the sessions of one owner share the texts. These
    options have dice of their own, so they do not change the rest of the world."""
    limits = replace(options.engine_limits, server_drafts=dice.random() < 0.7)
    options = replace(options, engine_limits=limits)
    if options.credentials == (ANYBODY,) and dice.random() < 0.5:
        return replace(options, credentials=(Credential("a"),))
    return options


def _with_server_drafter(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Give half of the verifiers a draft model, of any acceptance rate. Some have too little room
    for all sequences, some fail."""
    if dice.random() >= 0.5:
        return options
    limits = options.engine_limits
    text = limits.server_drafts and dice.random() < 0.5
    options = replace(
        options,
        engine_limits=replace(limits, drafter=True, server_drafts=text),
        server_drafter=dice.choice(DRAFTERS),
        server_step_s=dice.choice((0.0, 0.0005, 0.0025, 0.01)),
        pass_s=options.pass_s or dice.choice((0.0, 0.03)),
    )
    if options.quiet:
        return options
    return replace(
        options,
        refusal_chance=dice.choice((0.0, 0.05, 0.3)),
        drafter_failure_chance=dice.choice((0.0, 0.0, 0.01, 0.05)),
    )


def _with_named_prefixes(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Let most devices name what their verifier keeps of earlier texts. Some verifiers have room
    for a few blocks only."""
    if dice.random() < 0.3:
        return options
    block = dice.choice((1, 2, 3, 5))
    blocks = dice.choice((4, 12, 1000))
    limits = replace(
        options.engine_limits, prefix_block=block, prefix_bytes=blocks * block_bytes(block)
    )
    return replace(options, engine_limits=limits, names_prefixes=True)


def _draw_options(seed: int) -> worlds.WorldOptions:
    dice = random.Random(f"options of {seed}")
    vocabulary_size = dice.choice((2, 3, 5, 8))
    quiet = dice.random() < 0.3
    options = worlds.WorldOptions(
        model=ToyModel(
            vocabulary_size=vocabulary_size,
            order=dice.choice((0, 1, 2, 3)),
            seed=dice.getrandbits(20),
            sharpness=dice.choice((0.5, 1.0, 2.0)),
            eos_token=dice.choice((None, 0, vocabulary_size - 1)),
            eos_probability=dice.choice((0.02, 0.1)),
        ),
        drafter=dice.choice(DRAFTERS),
        policies=tuple(_draw_policy(dice) for _ in range(dice.choice((1, 1, 2, 3)))),
        prompt_length=dice.choice((1, 2, 5, 12)),
        sampling=_draw_sampling(dice, vocabulary_size),
        run_ahead=dice.choice(tuple(RunAhead)),
        drafting=dice.random() < 0.95,
        draft_context_length=dice.choice((1 << 16, 1 << 16, 20)),
        limits=_draw_limits(dice),
        engine_limits=_engine_limits(dice),
        delay_s=dice.choice((0.0, 0.001, 0.02, 0.1)),
        jitter_s=dice.choice((0.0, 0.0, 0.01, 0.1)),
        step_s=dice.choice((0.001, 0.005, 0.05)),
        pass_s=dice.choice((0.0, 0.005, 0.03)),
    )
    options = options if quiet else _with_faults(options, dice)
    if dice.random() < 0.4:
        options = _under_pressure(options, dice)
        sharing = random.Random(f"sharing of {seed}")
        options = _with_shared_texts(options, sharing) if sharing.random() < 0.6 else options
    return _with_keys(options, random.Random(f"keys of {seed}")) if seed % 4 == 3 else options


def _with_keys(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Give devices keys with priorities, rates and places, and rows a price."""
    options = replace(options, row_s=dice.choice((0.0, 0.0, 0.001, 0.01)))
    keys = [
        Credential(
            f"key {number}",
            max_sessions=dice.choice((0, 0, 1)),
            tokens_per_s=dice.choice((0.0, 0.0, 40.0, 400.0)),
            priority=dice.choice((-1, 0, 0, 1)),
        )
        for number in range(dice.choice((1, 2, 3)))
    ]
    return replace(options, credentials=tuple(keys))


def _under_pressure(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Make the cache little larger than the longest text of one device."""
    block_tokens = dice.choice((1, 4, 16))
    longest = options.prompt_length + options.sampling.max_tokens
    context_length = min(options.limits.context_length, longest)
    blocks = -(-context_length // block_tokens) + dice.choice((0, 0, 1, 5))
    return replace(
        options,
        policies=options.policies * dice.choice((1, 2)),
        limits=replace(options.limits, context_length=context_length),
        engine_limits=replace(options.engine_limits, cache=CacheShape(blocks, block_tokens)),
    )


def _with_shared_texts(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    """Let devices share one system prompt, or one chat that continues from device to device. The
    cache holds the longest text, and sometimes much of the earlier ones."""
    prompt_length, block_tokens = dice.choice((5, 12, 20)), dice.choice((1, 2, 4))
    policies = options.policies * dice.choice((2, 3))
    chat = dice.random() < 0.4
    turn = prompt_length + options.sampling.max_tokens
    longest = turn * len(policies) if chat else turn
    context_length = min(dice.choice((4096, 4096, 30)), longest)
    blocks = -(-context_length // block_tokens) + dice.choice((0, 1, 5, 40))
    return replace(
        options,
        prompt_length=prompt_length,
        shared_length=dice.choice((prompt_length, prompt_length * 2 // 3)),
        chat=chat,
        policies=policies,
        limits=replace(options.limits, context_length=context_length),
        engine_limits=replace(options.engine_limits, cache=CacheShape(blocks, block_tokens)),
    )


def _with_faults(options: worlds.WorldOptions, dice: random.Random) -> worlds.WorldOptions:
    return replace(
        options,
        faults_until_s=dice.choice((0.5, 2.0)),
        cuts=dice.choice((0, 1, 3)),
        replacements=dice.choice((0, 0, 1, 2)),
        restarts=dice.choice((0, 0, 1, 2)),
        duplicate_chance=dice.choice((0.0, 0.1, 0.5)),
        forge_chance=dice.choice((0.0, 0.0, 0.1)),
        batch_failure_chance=dice.choice((0.0, 0.2)),
        target_failure_chance=dice.choice((0.0, 0.0, 0.02, 0.1)),
        session_failure_chance=dice.choice((0.0, 0.0, 0.02, 0.1)),
    )


def _draw_policy(dice: random.Random) -> DraftPolicy:
    width = dice.choice((1, 1, 2, 3))
    kind = dice.randrange(3)
    if kind == 0:
        return FixedPolicy(dice.choice((None, 1, 4)), width)
    if kind == 1:
        return PearlPolicy(dice.choice((None, 1, 4)), width)
    return WindowedPolicy(width, dice.choice((None, 1, 4)), dice.choice((0.0, 0.02)))


def _draw_sampling(dice: random.Random, vocabulary_size: int) -> SamplingParams:
    stops = tuple(range(vocabulary_size - 1)) if dice.random() < 0.1 else ()
    params = SamplingParams(
        temperature=dice.choice((0.0, 0.0, 0.7, 1.0, 2.0)),
        top_p=dice.choice((1.0, 1.0, 0.8)),
        top_k=dice.choice((0, 0, 3)),
        min_p=dice.choice((0.0, 0.0, 0.1)),
        seed=dice.getrandbits(64) >> 2,
        stop_token_ids=stops,
        max_tokens=dice.choice((1, 2, 7, 20, 30)),
        ignore_eos=dice.random() < 0.3,
    )
    own = random.Random(params.seed)  # so that the worlds of a seed stay the same otherwise
    if own.random() < 0.2:
        params = replace(params, min_tokens=own.randint(1, params.max_tokens))
    if dice.random() < 0.7:
        return params
    return replace(
        params,
        repetition_penalty=dice.choice((1.0, 1.3)),
        presence_penalty=dice.choice((0.0, 0.5)),
        frequency_penalty=dice.choice((0.1, 0.4)),
        logit_bias={dice.randrange(vocabulary_size): dice.choice((-2.0, 1.0))},
    )


def _draw_limits(dice: random.Random) -> Limits:
    return Limits(
        context_length=dice.choice((4096, 4096, 16, 30)),
        max_nodes_outstanding=dice.choice((128, 16, 3)),
        max_nodes_per_pass=dice.choice((64, 4, 1)),
        max_unreceived=dice.choice((256, 8, 4, 0)),
        lease_s=dice.choice((5.0, 1.0, 0.3)),
    )


def _engine_limits(dice: random.Random) -> EngineLimits:
    return EngineLimits(
        max_sessions=dice.choice((64, 64, 1)),
        max_rows_per_pass=dice.choice((1024, 12, 3)),
        max_rows_per_session=dice.choice((512, 5, 2)),
    )

"""The trained policy: numpy equals torch, limits are kept, it is worth having."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from edgespec_uara import train
from edgespec_uara.cost import CostModel, PaperCost, objective, optimal, uniform
from edgespec_uara.methods import (
    PAIR_ACTIONS,
    Actor,
    Situation,
    Steps,
    best_gain,
    masac_shares,
    methods,
    pair_features,
    tma_masac,
    two_phase,
)
from edgespec_uara.train import BYTES_MAX, Training, exam, judge
from tests.uara.small import COSTS, snapshot, terms

torch = pytest.importorskip("torch")
SIZES = ((30, 4), (90, 12), (40, 20))


def test_numpy_says_what_torch_says() -> None:
    from edgespec_uara.masac.learner import Layout, TorchActor

    torch.manual_seed(3)
    network = TorchActor()
    actor = Actor({name: tensor.double().numpy() for name, tensor in network.state_dict().items()})
    association = np.random.default_rng(0).integers(4, size=24)
    association[association == 2] = 1  # An empty server has an empty pool.
    features = pair_features(terms())
    pairs, servers = actor.actions(features, association)
    own = torch.from_numpy(features[np.arange(24), association]).float()
    layout = Layout(torch.from_numpy(association), torch.zeros(4, dtype=torch.long), 1)
    with torch.no_grad():
        heads, whole = network.heads(own, layout)
    wanted = torch.tanh(heads[:, :PAIR_ACTIONS]).numpy()
    assert pairs[np.arange(24), association] == pytest.approx(wanted, abs=1e-5)
    assert servers == pytest.approx(torch.tanh(whole[:, :1]).numpy(), abs=1e-5)


def test_the_order_of_devices_does_not_matter() -> None:
    given, association = terms(1), np.arange(24) % 4
    features = pair_features(given)
    order = np.random.default_rng(1).permutation(24)
    actor = Actor.shipped()
    pairs, servers = actor.actions(features, association)
    shuffled, same = actor.actions(features[order], association[order])
    assert shuffled == pytest.approx(pairs[order])
    assert same == pytest.approx(servers)


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
@pytest.mark.parametrize(("devices", "servers"), SIZES)
def test_every_method_keeps_the_limits(cost: CostModel, devices: int, servers: int) -> None:
    now = snapshot(2, devices, servers)
    for method in methods(Actor.shipped()).values():
        decision = method(Situation(now, cost.terms(now), np.random.default_rng(0)))
        decision.check(servers)


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost.name)
def test_the_shipped_shares_lie_between_even_and_optimal(cost: CostModel) -> None:
    actor, even, ours, best = Actor.shipped(), 0.0, 0.0, 0.0
    for seed, (devices, servers) in enumerate(SIZES * 2):
        now = snapshot(100 + seed, devices, servers)
        given = cost.terms(now)
        association = two_phase(Situation(now, given, np.random.default_rng(0)))
        even += objective(given, uniform(given, association))
        ours += objective(given, masac_shares(actor, given, association))
        best += objective(given, optimal(given, association))
    assert best < ours < even
    # Most of what there is to gain is gained.
    assert (even - ours) > 0.5 * (even - best)


def test_rounds_only_help() -> None:
    actor, now = Actor.shipped(), snapshot(6)
    given, start = PaperCost().terms(now), best_gain(now.gains)
    decision = tma_masac(actor, given, start, Steps.SWAPS_AND_MOVES)
    assert objective(given, decision) < objective(given, masac_shares(actor, given, start))


def test_a_policy_equals_itself_after_reload(tmp_path: Path) -> None:
    from edgespec_uara.masac.learner import Learner, LearnerSettings

    training = Training(seed=1, updates=1, minutes=1.0)
    with pytest.raises(ValueError, match="nothing to keep yet"):
        training.write(tmp_path / "policy")
    training.best = Learner(LearnerSettings(), 1).arrays()
    training.score = 1.0
    training.write(tmp_path / "policy")
    loaded = Actor.load(tmp_path / "policy.npz")
    questions = exam(COSTS[:1])[:1]
    assert judge(loaded, questions) == judge(Actor(training.best), questions)
    with pytest.raises(ValueError, match="wanted"):
        Actor({"embed0.weight": np.zeros((1, 1))})


def test_an_interrupt_keeps_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(training: Training, console: object) -> None:
        training.best, training.score = dict(Actor.shipped().arrays), 1.5
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "run", interrupted)
    train.main(seed=0, updates=400, minutes=1.0, out=tmp_path / "half")
    assert Actor.load(tmp_path / "half.npz").arrays.keys() == Actor.shipped().arrays.keys()


def test_the_shipped_policy_is_small_and_has_its_card() -> None:
    folder = resources.files("edgespec_uara") / "policies"
    with resources.as_file(folder / "masac.npz") as path:
        assert path.stat().st_size <= BYTES_MAX
    assert '"seed"' in (folder / "masac.json").read_text(encoding="utf-8")


def test_learning_moves_towards_reward() -> None:
    """A few updates of the real learner: finite losses, and the same seed, the same arrays."""
    from edgespec_uara.masac.learner import Learner, LearnerSettings, Replay, Rollout

    def trained() -> dict[str, np.ndarray]:
        learner, rollout = Learner(LearnerSettings(batch=4), 5), Rollout(COSTS, 5)
        replay = Replay(50, np.random.default_rng(5))
        for _ in range(2):
            for transition in rollout.episode(learner.actor):
                replay.add(transition)
        for _ in range(3):
            learner.update(replay.draw(4))
        return learner.arrays()

    first, second = trained(), trained()
    assert all(np.isfinite(array).all() for array in first.values())
    assert all(np.array_equal(first[name], second[name]) for name in first)

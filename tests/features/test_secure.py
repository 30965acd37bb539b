"""Secure aggregation: correct sums, surviving drop-outs, hidden updates."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from scipy.stats import chi2

from raceme.client_app import client_app
from raceme.core.config import RunConfig
from raceme.core.errors import UserError
from raceme.core.events import (
    Ending,
    Event,
    Measured,
    RunEnded,
    UpdateApplied,
    UpdateRejected,
)
from raceme.core.messages import from_array, to_array
from raceme.features.central_privacy.server import CentralPrivacy, epsilon_of
from raceme.features.secure import Options
from raceme.features.secure.client import Secrets, work
from raceme.features.secure.protocol import (
    KEYS,
    MASKED,
    SHARES,
    STAGE,
    UNMASK,
    ProtocolError,
    Scale,
    combined,
    common_masks,
    mask,
    mean_of,
    new_private_key,
    public_key,
    quantized,
    shares_of,
    threshold,
)
from raceme.features.secure.server import Secure
from raceme.flower.messages import array_record
from raceme.runs.experiment import (
    build_grid,
    build_strategy,
    plan,
    resolve,
    simulate,
    training_settings,
)
from raceme.simulation import VirtualGrid
from raceme.training.models import initial_arrays

KEPT = {"dataset": "digits", "model": "mclr", "devices": "uniform", "workers": "0", "seed": 1}
Changed = Callable[[Message, Message, Context], Message | None]
"""Replaces a client's honest reply, given message, reply and context."""


# -----------------------------------------------------------------------------
# Runs whose clients may fail.
# -----------------------------------------------------------------------------


class Run:
    """A run in this process, whose replies pass through a function.

    Attributes
    ----------
    events : list[Event]
        All events.
    grid, method
        The grid and the method of the run.
    """

    def __init__(
        self,
        strategy: str,
        changed: Changed = lambda *_: None,
        slow: int = -1,
        stop: Callable[[Run], str] = lambda run: "",
        state: dict[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        config = resolve(RunConfig.from_mapping({**KEPT, "strategy": strategy, **keys}))
        self.events: list[Event] = []
        self.config, self.method = config, build_strategy(config)
        nodes = [
            replace(node, device=replace(node.device, bandwidth_up=100.0)) if at == slow else node
            for at, node in enumerate(build_grid(config).nodes)
        ]
        self.grid = VirtualGrid(app_of(changed), nodes, config.to_mapping(), config.seed)
        self._stop = stop
        if state is not None:
            self.method.load_state_dict(state["method"])
            self.grid.load_state_dict(state["grid"])
        self.start()

    def start(self) -> None:
        """Run to the end."""
        config = self.config
        self.method.run(
            self.grid,
            initial_arrays(config),
            config.max_updates or 0,
            train_config=training_settings(config),
            plan=plan(config),
            observe=self.events.append,
            stop_check=lambda: self._stop(self),
        )

    @property
    def vector(self) -> np.ndarray:
        """The model of cluster 0."""
        return self.method.models[0].vector

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def sums(self) -> list[tuple[int, int]]:
        """Updates in each sum, and members of its cohort."""
        found = [event for event in self.of(Measured) if event.schema.name == "secure_sum"]
        return [(event.values["summed"], event.values["members"]) for event in found]


def app_of(changed: Changed) -> ClientApp:
    honest, made = client_app(), ClientApp()

    def respond(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        return changed(message, reply, context) or reply

    made.train()(respond)
    made.evaluate()(respond)
    made.query()(respond)
    return made


def stage_of(message: Message) -> str:
    config = message.content.config_records.get("config", {})
    return str(config.get(STAGE, "train" if "lr" in config else ""))


def failing(stage: str, clients: Collection[int], times: int = 1) -> Changed:
    """Let clients fail in a stage, a number of times each."""
    failed: dict[int, int] = {}

    def changed(message: Message, reply: Message, context: Context) -> None:
        client = int(context.node_config["partition-id"])
        if stage_of(message) == stage and client in clients and failed.get(client, 0) < times:
            failed[client] = failed.get(client, 0) + 1
            raise RuntimeError("killed")

    return changed


# -----------------------------------------------------------------------------
# The mathematics.
# -----------------------------------------------------------------------------


def test_masks_cancel_out_also_those_of_a_member_that_is_missing() -> None:
    size, secrets = 1000, [new_private_key() for _ in range(5)]
    public = {member: public_key(secret) for member, secret in enumerate(secrets)}

    def others(member: int, among: Collection[int]) -> dict[int, bytes]:
        return {other: public[other] for other in among if other != member}

    everyone, present = range(5), range(4)
    masks = [common_masks(secrets[i], i, others(i, everyone), size) for i in everyone]
    assert not sum(masks).any()
    assert all(one.any() for one in masks)
    rest = sum(masks[:4]) + common_masks(secrets[4], 4, others(4, present), size)
    assert not rest.any()


def test_more_than_two_thirds_of_the_shares_reveal_a_secret_and_fewer_do_not() -> None:
    assert [threshold(members) for members in (3, 5, 6, 20, 100)] == [3, 4, 5, 14, 67]
    secret = new_private_key()
    shares = shares_of(secret, 5)
    assert combined(shares[1:], 5) == secret
    assert combined([shares[3], shares[0], shares[4], shares[1]], 5) == secret
    with pytest.raises(ProtocolError, match="3 shares of a secret, not 4"):
        combined(shares[:3], 5)
    with pytest.raises(ProtocolError, match="do not fit together"):
        combined([shares[0], shares_of(secret, 5)[1], *shares[2:4]], 5)


def test_a_mask_is_the_key_stream_of_aes_256() -> None:
    # NIST's AESAVS, a key of zeros: the first block of zeros.
    assert mask(bytes(32), 4).tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_the_mean_is_right_to_a_level_of_each_member() -> None:
    rng = np.random.default_rng(0)
    scale, weights = Scale(largest=2.0, most=32), [1.0, 0.5, 0.25]
    changes = rng.normal(size=(3, 5000)).clip(-2, 2).astype(np.float32)
    total = sum(quantized(change, w, scale) for change, w in zip(changes, weights, strict=True))
    exact = np.average(changes.astype(np.float64), axis=0, weights=weights)
    # 3 / 1.75 levels of 4 / 2^26 each.
    assert scale.bound(weights) == pytest.approx(3 / 1.75 * 4 / 2**26, rel=1e-6)
    assert np.abs(mean_of(total, weights, scale) - exact).max() <= scale.bound(weights) + 1e-7
    with pytest.raises(ProtocolError, match="out of range"):
        mean_of(total + mask(bytes(32), 5000), weights, scale)


def test_rounding_depends_on_the_change_only_and_leaves_numpys_generator_alone() -> None:
    scale, change = Scale(8.0, 32), np.linspace(-1, 1, 100, dtype=np.float32)
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    first = quantized(change, 0.3, scale)
    assert np.random.rand() == expected
    assert (quantized(change, 0.3, scale) == first).all()


# -----------------------------------------------------------------------------
# Requests that a member refuses.
# -----------------------------------------------------------------------------


def cohort(members: int) -> list[Secrets]:
    """Return members that hold all shares of each other."""
    made = [Secrets.new() for _ in range(members)]
    keys = np.stack([member.public for member in made])
    sent = [member.encrypted_shares(keys, at, least=3) for at, member in enumerate(made)]
    for at, member in enumerate(made):
        others = [other for other in range(members) if other != at]
        member.take_shares(np.stack([sent[other][at] for other in others]), others)
    return made


def test_members_together_remove_the_masks_of_those_that_answered() -> None:
    members, size = cohort(5), 50
    total = sum(member.masks(size) for member in members[:4])
    revealed = [member.revealed([0, 1, 2, 3], [4]) for member in members[:4]]
    for row in range(4):
        total -= mask(combined([shares[row].tobytes() for shares in revealed], 5), size)
    gone = combined([shares[4].tobytes() for shares in revealed], 5)
    public = {at: members[at].public[:33].tobytes() for at in range(4)}
    assert not (total + common_masks(gone, 4, public, size)).any()


@pytest.mark.parametrize(
    ("answered", "missing", "words"),
    [
        ([0, 1, 2, 3, 4], [4], "other members"),
        ([0, 1, 2, 3], [], "other members"),
        ([1, 2, 3, 4], [0], "other members"),
        ([0, 0, 1, 2], [3, 4], "other members"),
        ([0, 1, 2], [3, 4], "a sum of 3 updates is too small"),
    ],
)
def test_a_member_reveals_no_more_than_a_sum_needs(
    answered: list[int], missing: list[int], words: str
) -> None:
    with pytest.raises(ProtocolError, match=words):
        cohort(5)[0].revealed(answered, missing)


def test_a_member_takes_part_in_no_impossible_cohort() -> None:
    made = [Secrets.new() for _ in range(5)]
    keys = np.stack([member.public for member in made])
    with pytest.raises(ProtocolError, match="a cohort of 4 members, not of 5"):
        made[0].encrypted_shares(keys[:4], 0, least=5)
    with pytest.raises(ProtocolError, match="two members have one key"):
        made[0].encrypted_shares(np.stack([*keys[:4], keys[1]]), 0, least=5)
    with pytest.raises(ProtocolError, match="own keys are missing"):
        made[0].encrypted_shares(keys, 1, least=5)
    other = cohort(5)[0]
    with pytest.raises(ProtocolError, match="are too few"):
        other.take_shares(np.zeros((2, 248), np.uint8), [1, 2])


def test_stages_are_answered_in_order_and_once() -> None:
    context = Context(1, 7, {}, RecordDict(), {})
    context.state["secure-change"] = array_record(
        {"secure-change": to_array(np.zeros(3, np.float32))}
    )
    kept = cohort(5)[0]
    kept.stage = MASKED
    context.state["secure-secrets"] = kept.record()

    def ask(stage: str) -> Message:
        told = {STAGE: stage, "kind": "secure", "task": 1}
        told |= {"secure-answered": [0, 1, 2, 3], "secure-missing": [4]}
        message = Message(RecordDict({"config": ConfigRecord(told)}), 7, "train")
        return work(message, context, lambda message, context: message, Options(secure=True))

    with pytest.raises(ProtocolError, match="secure-masked does not follow secure-masked"):
        ask(MASKED)
    ask(UNMASK)
    for stage in (UNMASK, KEYS):
        with pytest.raises(ProtocolError, match="there is no update to sum"):
            ask(stage)


# -----------------------------------------------------------------------------
# Sums.
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "keys"),
    [
        ("fedbuff", {"fedbuff.k": 5}),
        ("fedavg", {"max-updates": 15}),
        ("fedprox", {"max-updates": 5}),
        ("t-fedavg", {"t-fedavg.picked": 5, "t-fedavg.budget": 30}),
    ],
)
def test_the_sum_is_the_plain_one(strategy: str, keys: dict[str, Any]) -> None:
    keys = {"clients": 5, "max-updates": 5, **keys}
    plain, secure = Run(strategy, **keys), Run(strategy, secure=True, **keys)
    updates = keys["max-updates"]
    assert len(secure.of(UpdateApplied)) == len(plain.of(UpdateApplied)) == updates
    assert secure.sums == [(5, 5)] * (updates // 5)
    # Weights by examples differ by a factor of 4 at most; each round adds a rounding error.
    bound = 4 * updates // 5 * Scale(8.0, 32).bound([1.0] * 5)
    assert np.abs(plain.vector - secure.vector).max() <= bound + 1e-6
    assert np.abs(plain.vector - initial_vector(plain)).max() > 100 * bound


def initial_vector(run: Run) -> np.ndarray:
    return run.method.spec.unpack(run.method.initial)


def test_updates_of_different_staleness_have_their_weights_in_the_sum() -> None:
    keys = {"clients": 8, "max-updates": 24, "devices": "slow30x10", "fedbuff.k": 4}
    seen: dict[str, np.ndarray] = {}

    def keep(message: Message, reply: Message, context: Context) -> None:
        if stage_of(message) == "train":
            seen[str(context.node_id)] = change_of(context)
        elif stage_of(message) == MASKED:
            weighted.append((float(message.content["config"]["secure-weight"]), change_of(context)))

    weighted: list[tuple[float, np.ndarray]] = []
    run = Run("fedbuff", keep, secure=True, **{**keys, "secure-least": 4, "secure-most": 4})
    stale = [event.staleness for event in run.of(UpdateApplied)]
    assert len(set(stale)) > 1
    assert {round(weight, 3) for weight, _ in weighted} > {1.0}
    # With cohorts of K members a cohort is a step: w = w + 1/K Σ s Δ.
    w, total = initial_vector(run).astype(np.float64), 0.0
    for cohort in range(len(stale) // 4):
        part = slice(4 * cohort, 4 * cohort + 4)
        largest = max(1 / np.sqrt(1 + s) for s in stale[part])
        total = sum(weight * largest * change for weight, change in weighted[part])
        w += total / 4
    assert np.abs(run.vector - w).max() < 1e-5


def change_of(context: Context) -> np.ndarray:
    return np.array(from_array(context.state.array_records["secure-change"]["secure-change"]))


def test_two_runs_are_equal_although_their_masks_differ() -> None:
    masked: list[bytes] = []

    def keep(message: Message, reply: Message, context: Context) -> None:
        if stage_of(message) == MASKED:
            masked.append(from_array(reply.content["numbers"][MASKED]).tobytes())

    keys = {"clients": 8, "max-updates": 30, "devices": "slow30x10"}
    one, two = (Run("fedbuff", keep, secure=True, **keys) for _ in range(2))
    assert one.vector.tobytes() == two.vector.tobytes()
    assert one.of(UpdateApplied) == two.of(UpdateApplied)
    assert len(set(masked)) == len(masked) > 50


def test_the_sum_of_panicles_members_is_the_plain_one() -> None:
    # With one cluster, Panicle keeps the sum of the members' latest models, weighted by examples.
    keys = {"clients": 5, "model": "mlp300", "panicle.clustering": False, "own-model": False}
    keys |= {"max-updates": 5, "panicle.drift": False}
    plain, secure = Run("panicle", **keys), Run("panicle", secure=True, **keys)
    totals = [run.method.state.learned[0] for run in (plain, secure)]
    assert totals[0].examples == totals[1].examples > 0
    means = [one.total / one.examples for one in totals]
    # Later updates differ, as the plain run's clients get work at other times.
    bound = 4 * Scale(8.0, 32).bound([1.0] * 5)
    assert secure.sums == [(5, 5)]
    assert np.abs(means[0] - means[1]).max() <= bound + 1e-5


def test_panicle_groups_clients_by_sketches_that_the_devices_make() -> None:
    probes: list[Message] = []

    def keep(message: Message, reply: Message, context: Context) -> None:
        if message.content.config_records.get("config", {}).get("sketch"):
            probes.append(reply)

    keys = {"clients": 12, "groups": "0.5,0.5", "model": "mlp300", "max-updates": 60}
    run = Run("panicle", keep, secure=True, **keys, **{"local-epochs": 3})
    assert len(probes) >= 24
    for reply in probes:
        (arrays,) = reply.content.array_records.values()
        assert set(arrays) == {"sketch"}
        assert from_array(arrays["sketch"]).shape == (1024,)
    members = run.method.clusters.members
    groups = {f"client-{i}": run.method.clusters.main(f"client-{i}") for i in range(12)}
    assert set(members) == set(groups)
    assert len(set(groups.values())) == 2
    assert {frozenset(c for c in groups if groups[c] == k) for k in groups.values()} == {
        frozenset(f"client-{i}" for i in part) for part in (range(6), range(6, 12))
    }


def test_a_sketch_in_place_of_an_update_is_refused() -> None:
    def cheat(message: Message, reply: Message, context: Context) -> Message | None:
        asked = message.content.config_records.get("config", {})
        if stage_of(message) != "train" or context.node_config["partition-id"] or "sketch" in asked:
            return None
        sketch = to_array(np.zeros(1024, np.float32))
        reply.content["numbers"] = array_record({"sketch": sketch})
        return reply

    run = Run("fedbuff", cheat, secure=True, clients=6, **{"max-updates": 10})
    assert {event.client for event in run.of(UpdateRejected)} == {"client-0"}
    assert run.of(UpdateRejected)[0].reason == "its public keys are invalid"


@pytest.mark.parametrize(
    "keys",
    [
        {"own-model": True, "score-uploads": True},
        {"fair": "clients", "devices": "slow30x10"},
        {"eval-tasks": True, "drift": "swap-all", "drift-at": "2s"},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_features_that_need_no_single_update_work_beside_it(keys: dict[str, Any]) -> None:
    run = Run("fedbuff", secure=True, clients=8, **{"max-updates": 40, **keys})
    assert len(run.of(UpdateApplied)) >= 40
    assert not run.of(UpdateRejected)
    if "score-uploads" in keys:
        assert any(event.accuracy_after is not None for event in run.of(UpdateApplied))


@pytest.mark.slow
def test_sums_are_equal_wherever_clients_work(tmp_path: Path) -> None:
    keys = {**KEPT, "strategy": "fedbuff", "clients": 8, "max-updates": 30, "secure": True}
    found = {}
    for name, changes in {
        "here": {},
        "processes": {"workers": "1"},
        "vectorised": {"vectorised": True},
    }.items():
        config = RunConfig.from_mapping({**keys, **changes, "out": str(tmp_path / name)})
        found[name] = simulate(config)
    for outcome in found.values():
        assert outcome.summary["bytes_up"] == found["here"].summary["bytes_up"]
        assert outcome.summary["accuracy"] == pytest.approx(found["here"].summary["accuracy"])


# -----------------------------------------------------------------------------
# Drop-outs.
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "sums"),
    [("train", (5, 5)), (SHARES, (5, 6)), (MASKED, (5, 6)), (UNMASK, (6, 6))],
)
def test_a_member_may_fail_in_every_stage(stage: str, sums: tuple[int, int]) -> None:
    run = Run("fedavg", failing(stage, {2}), secure=True, clients=6, **{"max-updates": 11})
    assert run.sums == [sums, (6, 6)]
    (refused,) = run.of(UpdateRejected)
    assert "killed" in refused.reason
    # The sum contains the update that the member had sent before it failed.
    assert len(run.of(UpdateApplied)) == 11


@pytest.mark.parametrize("stage", [SHARES, MASKED])
def test_members_of_a_cohort_that_breaks_up_go_to_the_next(stage: str) -> None:
    keys = {"clients": 8, "max-updates": 16, "secure-least": 5}
    run = Run("fedavg", failing(stage, {0, 1, 2}), secure=True, **keys)
    first, *_ = run.sums
    # Six of eight members must answer. Five do, so their updates go into the next cohort.
    assert first == (5, 5)
    assert len(run.of(UpdateRejected)) == 3
    applied = run.of(UpdateApplied)
    assert {event.dispatched_at for event in applied[:5]} == {0.0}


def test_too_few_shares_lose_the_sum_and_no_second_one_is_made() -> None:
    keys = {"clients": 8, "max-updates": 8, "secure-least": 8}
    run = Run("fedbuff", failing(UNMASK, {0, 1, 2}), secure=True, **keys)
    reasons = [event.reason for event in run.of(UpdateRejected)]
    assert sum("broke up before the sum was known" in reason for reason in reasons) == 5
    assert all(event.dispatched_at > 0 for event in run.of(UpdateApplied))


@pytest.mark.parametrize(("seconds", "sums"), [(5, (5, 6)), (60, (6, 6))])
def test_a_late_member_goes_to_the_next_cohort(seconds: int, sums: tuple[int, int]) -> None:
    keys = {"clients": 6, "max-updates": 12, "secure-least": 6, "secure-seconds": seconds}
    # 650 weights take it 26 s.
    run = Run("fedbuff", slow=3, secure=True, **keys)
    assert set(run.sums) == {sums}
    assert not run.of(UpdateRejected)
    late = [event for event in run.of(UpdateApplied) if event.client == "client-3"]
    assert bool(late) is (sums == (6, 6))


# -----------------------------------------------------------------------------
# The server's view.
# -----------------------------------------------------------------------------


def test_the_server_sees_no_single_update() -> None:
    plain: list[np.ndarray] = []
    replies: list[Message] = []

    def keep(message: Message, reply: Message, context: Context) -> None:
        if stage_of(message) == "train":
            change = change_of(context)
            base = np.concatenate(
                [from_array(array).ravel() for array in message.content["arrays"].values()]
            )
            plain.extend([change, base + change])
        replies.append(reply)

    keys = {"clients": 6, "max-updates": 24, "devices": "slow30x10"}
    run = Run("fedbuff", keep, secure=True, **keys)
    sent = b"".join(
        from_array(array).tobytes()
        for reply in replies
        for record in reply.content.array_records.values()
        for array in record.values()
    )
    kept = pickle.dumps(run.method.state_dict()) + pickle.dumps(run.events)
    assert len(plain) >= 24
    for vector in plain:
        # Parts with zeros are skipped: weights of pixels that are always 0 do not change.
        parts = [vector[at : at + 8] for at in range(0, len(vector) - 7, 8)]
        for part in (part.tobytes() for part in parts if np.abs(part).min() > 0):
            assert part not in sent
            assert part not in kept
    # Cross-check that the search finds a known part.
    assert run.vector[:8].tobytes() in kept


@pytest.mark.parametrize(
    ("stage", "noise"), [(SHARES, 0.0), (MASKED, 0.0), (UNMASK, 0.0), (MASKED, 1.0)]
)
def test_a_resumed_run_is_the_one_that_was_never_interrupted(stage: str, noise: float) -> None:
    states: list[dict[str, Any]] = []

    def keep(run: Run) -> str:
        cohorts = run.method.features.state_dict()["secure"]["cohorts"]
        stages = [one["stage"] for one in cohorts if run.method.progress.updates >= 10]
        if stage in stages and not states:
            state = {"method": run.method.state_dict(), "grid": run.grid.state_dict()}
            states.append(copy.deepcopy(state))
        return ""

    keys = {"clients": 6, "max-updates": 30, "devices": "slow30x10", "privacy-central": noise}
    whole = Run("fedbuff", stop=keep, secure=True, **keys)
    assert states[0]["method"]["progress"]["held"]
    resumed = Run("fedbuff", state=states[0], secure=True, **keys)
    assert resumed.vector.tobytes() == whole.vector.tobytes()
    assert resumed.of(UpdateApplied) == whole.of(UpdateApplied)[-len(resumed.of(UpdateApplied)) :]


# -----------------------------------------------------------------------------
# Bad input, and unsupported settings.
# -----------------------------------------------------------------------------


def test_a_device_without_the_feature_is_refused() -> None:
    def plain(message: Message, reply: Message, context: Context) -> Message | None:
        if stage_of(message) != "train" or context.node_config["partition-id"] != 0:
            return None
        model = message.content["arrays"]
        del reply.content["numbers"]
        reply.content["arrays"] = model
        return reply

    run = Run("fedbuff", plain, secure=True, clients=6, **{"max-updates": 10})
    assert {event.client for event in run.of(UpdateRejected)} == {"client-0"}
    assert "knows no secure aggregation" in run.of(UpdateRejected)[0].reason
    assert len(run.of(UpdateApplied)) == 10


def test_invalid_keys_do_not_spoil_the_cohort_of_others() -> None:
    def spoiled(message: Message, reply: Message, context: Context) -> Message | None:
        if stage_of(message) != "train" or context.node_config["partition-id"] != 0:
            return None
        reply.content["numbers"] = array_record({KEYS: to_array(np.full(66, 5, np.uint8))})
        return reply

    run = Run("fedavg", spoiled, secure=True, clients=6, **{"max-updates": 5})
    (refused,) = run.of(UpdateRejected)
    assert (refused.client, refused.reason) == ("client-0", "its public keys are invalid")
    assert run.sums == [(5, 5)]


def test_two_devices_of_one_key_are_not_in_one_cohort() -> None:
    keys: list[np.ndarray] = []

    def copied(message: Message, reply: Message, context: Context) -> Message | None:
        if stage_of(message) != "train" or context.node_config["partition-id"] not in (0, 1):
            return None
        keys.append(np.array(from_array(reply.content["numbers"][KEYS])))
        reply.content["numbers"] = array_record({KEYS: to_array(keys[0])})
        return reply

    run = Run("fedavg", copied, secure=True, clients=7, **{"max-updates": 6})
    (refused,) = run.of(UpdateRejected)
    assert refused.reason == "its keys are those of another member: is the device a copy?"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"strategy": "casa"}, "casa compares or keeps updates of single clients"),
        ({"strategy": "fedasync"}, "fedasync compares or keeps"),
        ({"strategy": "fedmedian"}, "fedmedian compares or keeps"),
        ({"strategy": "csafl"}, "csafl compares or keeps"),
        ({"protection": "trust"}, "protection judges single updates: leave it out"),
        ({"upload": "int8"}, "upload is shorter than masks may be: leave it out"),
        ({"discrepancy": True}, "discrepancy compares single updates: leave it out"),
        ({"clients": 4}, "no cohort of 5 members forms, as 4 clients work at a time"),
        ({"strategy": "fedavg", "fedavg.fraction": 0.2}, "as 2 clients work at a time"),
        ({"strategy": "panicle"}, "sketches of 1024 numbers, by which clients are grouped"),
        ({"secure-least": 40, "clients": 60}, "secure-most must be at least secure-least, 40"),
    ],
)
def test_what_needs_single_updates_is_refused_in_one_line(keys: dict[str, Any], words: str) -> None:
    given = {**KEPT, "strategy": "fedbuff", "clients": 10, "secure": True, **keys}
    with pytest.raises(UserError, match=words) as raised:
        simulate(RunConfig.from_mapping(given))
    assert "\n" not in str(raised.value)


def test_a_round_of_too_few_members_is_refused_and_the_next_one_begins() -> None:
    gone = failing("train", {0, 1, 2})
    run = Run("fedavg", gone, secure=True, clients=7, **{"max-updates": 7, "max-time": 100})
    reasons = {event.reason for event in run.of(UpdateRejected)}
    assert "fewer than 5 members of its cluster are ready (secure-least)" in reasons
    assert set(run.sums) <= {(7, 7), (5, 5), (6, 6)}
    assert run.sums


def test_a_fleet_that_never_has_a_cohort_is_warned_of_and_the_simulation_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Half of the clients leave after their greeting.
    config = RunConfig.from_mapping({**KEPT, "strategy": "fedbuff", "clients": 8, "secure": True})
    config = resolve(config.with_values(max_updates=50))
    method, events = build_strategy(config), list[Event]()
    nodes = build_grid(config).nodes[:4]
    grid = VirtualGrid(client_app(), nodes, config.to_mapping(), config.seed)
    method.run(
        grid,
        initial_arrays(config),
        50,
        train_config=training_settings(config),
        plan=plan(config),
        observe=events.append,
    )
    assert "Cluster 0 has 4 clients online: updates wait until it has 5" in caplog.text
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.reason.startswith("all clients wait for cohorts of 5 members")


def test_the_feature_takes_no_part_without_its_key() -> None:
    assert not Secure().is_on
    assert RunConfig.from_mapping({"strategy": "fedbuff"}).value("client-map")
    assert not resolve(RunConfig.from_mapping({"strategy": "fedbuff", "secure": True})).value(
        "client-map"
    )


# -----------------------------------------------------------------------------
# With central privacy: devices clip, and the server adds noise to sums.
# -----------------------------------------------------------------------------


def private(noise: float, **keys: Any) -> Run:
    """Run one round of FedAvg with six clients, secure and with noise."""
    keys = {"clients": 6, "max-updates": 6, "privacy-clip": 0.25, "lr": 0.1, **keys}
    return Run("fedavg", secure=True, **keys, **{"privacy-central": noise})


def test_devices_clip_before_they_mask_and_the_mean_is_that_of_clipped_changes() -> None:
    changes: list[np.ndarray] = []

    def keep(message: Message, reply: Message, context: Context) -> None:
        if stage_of(message) == "train":
            changes.append(change_of(context))

    run = private(1e-9, changed=keep)
    lengths = [float(np.linalg.norm(change)) for change in changes]
    assert lengths == pytest.approx([0.25] * 6, rel=1e-5)
    initial = run.method.spec.unpack(run.method.initial)
    bound = Scale(8.0, 32).bound([1.0] * 6)
    # Numbers of examples do not count.
    assert run.sums == [(6, 6)]
    assert np.abs(run.vector - initial - np.mean(changes, axis=0)).max() <= bound + 1e-6


def test_the_noise_on_a_sum_has_the_stated_variance() -> None:
    exact, noisy = private(1e-9), private(2.0)
    noise = (noisy.vector - exact.vector) / (2.0 * 0.25 / 6)
    # Fails by chance for one of 10,000 seeds.
    low, high = chi2.ppf([5e-5, 1 - 5e-5], noise.size)
    assert low < float(np.square(noise.astype(np.float64)).sum()) < high
    again = private(2.0)
    assert again.vector.tobytes() == noisy.vector.tobytes()
    epsilons = [e.values["epsilon"] for e in noisy.of(Measured) if e.schema.name == "privacy"]
    assert epsilons == [epsilon_of(1, 2.0, 1e-5)]


def test_every_member_of_a_cohort_gets_the_same_noise() -> None:
    # The buffer of 3 takes parts of cohorts of 6 and 7 members.
    keys = {"clients": 7, "max-updates": 30, "devices": "uniform", "fedbuff.k": 3}
    run = Run("fedbuff", secure=True, **keys, **{"privacy-central": 1.0, "secure-least": 6})
    feature = next(one for one in run.method.features if isinstance(one, CentralPrivacy))
    assert feature.state.draws == len(run.sums) > 3
    assert sum(feature.state.participations.values()) == len(run.of(UpdateApplied))


def test_a_device_that_does_not_clip_is_refused() -> None:
    def unclipped(message: Message, reply: Message, context: Context) -> Message | None:
        if stage_of(message) != "train" or context.node_config["partition-id"] != 0:
            return None
        del reply.content["metrics"]["privacy-clip"]
        return reply

    run = private(1.0, changed=unclipped, clients=7)
    assert {event.client for event in run.of(UpdateRejected)} == {"client-0"}
    assert "knows no privacy-central" in run.of(UpdateRejected)[0].reason
    assert run.sums == [(6, 6)]


def test_panicle_keeps_its_groups_with_secure_sums_and_noise() -> None:
    # A small model, since sketches have their own noise.
    keys = {"clients": 16, "groups": "0.5,0.5", "max-updates": 96, "local-epochs": 3}
    keys |= {"panicle.sketch-epsilon": 800.0, "secure-least": 6, "privacy-known-groups": True}
    run = Run("panicle", secure=True, **keys, **{"privacy-central": 0.2, "privacy-updates": 6})
    groups = {f"client-{i}": run.method.clusters.main(f"client-{i}") for i in range(16)}
    assert len(set(groups.values())) == 2
    assert len({groups[f"client-{i}"] for i in range(8)}) == 1
    assert run.sums
    assert not run.of(UpdateRejected)


def test_a_spent_budget_ends_a_run_whose_last_updates_find_no_cohort() -> None:
    budget = {"privacy-central": 3.0, "privacy-budget": epsilon_of(2, 3.0, 1e-5) + 1e-6}
    keys = {"clients": 6, "max-updates": 1000, "devices": "slow30x10", "secure-least": 4}
    run = Run("fedbuff", secure=True, **keys, **budget)
    (ended,) = run.of(RunEnded)
    assert ended.ending is Ending.LIMIT
    taken = [event.client for event in run.of(UpdateApplied)]
    assert max(map(taken.count, taken)) == 2
    # Every trained update is used.
    assert not run.of(UpdateRejected)
    assert ended.reason == (
        "4 clients may contribute no more, and the others wait for cohorts of 4 members of a "
        "cluster (secure-least)"
    )

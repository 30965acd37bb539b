"""Guards: decisions by the length and by the direction of updates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pytest

from raceme.core.events import Verdict
from raceme.core.messages import Vector
from raceme.features.protection.guards import (
    FEWEST,
    FilterOptions,
    FilterProtection,
    Gain,
    Guard,
    Home,
    Judged,
    NormOptions,
    NormProtection,
    Record,
    Ruling,
    TrustOptions,
    TrustProtection,
    contradiction,
    gain_of,
    opposed,
)


def home(client: str) -> int:
    """Clients x… have their own cluster."""
    return 1 if client.startswith("x") else 0


def judge(
    guard: Guard,
    client: str,
    delta: Vector,
    start: float,
    home: Home,
    awaited: int = 0,
    gain: Gain | None = None,
    online: int = 0,
    present: Collection[str] | None = None,
) -> Ruling:
    """Judge an update, in a fleet with one model, or with clusters and `online` clients."""
    one_model = awaited > 0
    is_online = None if present is None else present.__contains__
    return guard.judge(
        Judged(client, delta, start, home, awaited or online, is_online, one_model, gain)
    )


def along(axis: int, length: float = 1.0, size: int = 16) -> np.ndarray:
    vector = np.zeros(size, np.float32)
    vector[axis] = length
    return vector


def heard(guard: Guard, lengths: dict[str, float]) -> None:
    for client, length in lengths.items():
        assert judge(guard, client, along(0, length), 10.0, home).verdict is Verdict.ACCEPTED


def same(client: str) -> int:
    """All clients are in one cluster."""
    return 0


FIVE = {f"c{index}": length for index, length in enumerate((1.0, 2.0, 3.0, 4.0, 5.0))}
"""Five clients whose median length is 3."""


def test_an_update_beyond_the_bound_is_scaled_to_the_median_of_the_others() -> None:
    guard = NormProtection(NormOptions(protection_factor=4.0))
    heard(guard, FIVE)
    assert judge(guard, "new", along(0, 12.0), 10.0, home).verdict is Verdict.ACCEPTED
    # The median of the six others: 3.5 of 1, 2, 3, 4, 5 and 12.
    ruling = judge(guard, "next", along(0, 14.5), 10.0, home)
    assert (ruling.verdict, ruling.measured, ruling.bound) == (Verdict.SCALED, 14.5, 14.0)
    assert ruling.scale == pytest.approx(3.5 / 14.5)


def test_or_it_is_refused() -> None:
    guard = NormProtection(NormOptions(protection_factor=4.0, protection_beyond="refuse"))
    heard(guard, FIVE)
    ruling = judge(guard, "new", along(0, 12.1), 10.0, home)
    assert (ruling.verdict, ruling.verdict.is_withheld) == (Verdict.REFUSED, True)
    assert (ruling.measured, ruling.bound) == (pytest.approx(12.1), 12.0)
    assert ruling.reason == "an update that is far longer than those of others"


def test_a_client_does_not_move_its_own_bound() -> None:
    guard = NormProtection(NormOptions(protection_factor=4.0))
    heard(guard, FIVE)
    rulings = [judge(guard, "new", along(0, 1000.0), 10.0, home) for _ in range(50)]
    assert {ruling.bound for ruling in rulings} == {12.0}


def test_where_most_updates_move_nothing_lengths_say_nothing() -> None:
    guard = NormProtection()
    heard(guard, {f"c{index}": 0.0 for index in range(9)})
    assert judge(guard, "new", along(0, 1.0), 10.0, home).verdict is Verdict.ACCEPTED


def test_lengths_are_those_of_the_own_cluster_where_it_has_enough() -> None:
    guard = NormProtection(NormOptions(protection_factor=2.0))
    heard(guard, FIVE)
    heard(guard, {f"x{index}": 0.5 for index in range(FEWEST)})
    # x9 is compared with 0.5; among all clients the median would be 1.5.
    assert judge(guard, "x9", along(0, 1.1), 10.0, home).bound == 1.0
    assert judge(guard, "c9", along(0, 5.9), 10.0, home).verdict is Verdict.ACCEPTED


def test_before_there_is_anything_to_compare_with_the_model_itself_is_the_bound() -> None:
    guard = NormProtection(NormOptions(protection_factor=4.0))
    ruling = judge(guard, "a", along(0, 40.1), 10.0, home)
    assert (ruling.verdict, ruling.bound) == (Verdict.REFUSED, 40.0)
    assert judge(guard, "a", along(0, 39.9), 10.0, home).verdict is Verdict.ACCEPTED
    # A model of zeros has no length to compare with.
    assert judge(guard, "b", along(0, 9.9), 0.0, home).verdict is Verdict.ACCEPTED


def test_a_short_model_stops_a_fleet_only_until_all_are_seen_to_be_alike() -> None:
    guard = NormProtection()
    verdicts = [judge(guard, f"c{index}", along(0, 11.0), 1.0, home).verdict for index in range(7)]
    assert verdicts == [Verdict.REFUSED] * FEWEST + [Verdict.ACCEPTED] * 2


def test_only_as_many_clients_are_remembered_as_the_window_has() -> None:
    guard = FilterProtection(FilterOptions(protection_window=6))
    for index in range(9):
        judge(guard, f"c{index}", along(0), 10.0, home)
    judge(guard, "c4", along(0), 10.0, home)
    assert list(guard.state.lengths) == ["c3", "c5", "c6", "c7", "c8", "c4"]
    assert set(guard.state.directions) == set(guard.state.lengths)


def fleet_of(
    guard: Guard, rounds: int, online: int = 0, one_model: bool = False, **attackers: np.ndarray
) -> list[str]:
    """Let six clients agree, and others send the given updates; return the excluded clients."""
    rng = np.random.default_rng(0)
    awaited = 7 if one_model else 0
    for _ in range(rounds):
        for index in range(6):
            noise = 0.2 * rng.standard_normal(16).astype(np.float32)
            judge(guard, f"c{index}", along(0) + noise, 10.0, home, awaited, online=online)
        for name, vector in attackers.items():
            judge(guard, name, vector, 10.0, home, awaited, online=online)
    return sorted(guard.state.excluded)


def test_who_points_against_the_others_or_where_nobody_does_is_excluded() -> None:
    # In the first round too few clients are known for a comparison; then a record takes 3 updates.
    assert fleet_of(FilterProtection(), 3, flips=along(0, -1), odd=along(5)) == []
    assert fleet_of(FilterProtection(), 4, flips=along(0, -1), odd=along(5)) == ["flips", "odd"]


def test_attackers_that_agree_with_each_other_are_not_excluded() -> None:
    """The first undefended case in docs/protection.md: such attackers look like a group."""
    common = {"one": along(5), "two": along(5)}
    assert fleet_of(FilterProtection(), 10, **common) == []
    assert fleet_of(FilterProtection(), 10, one=along(5), two=along(6)) == ["one", "two"]


def rounds_without_mates(guard: FilterProtection, rounds: int, awaited: int) -> None:
    """Let nine clients agree, and one send a unique update, in a fleet of this size."""
    for _ in range(rounds):
        for index in range(9):
            judge(guard, f"c{index}", along(0), 10.0, home, awaited)
        judge(guard, "odd", along(5), 10.0, home, awaited)


def test_nobody_is_excluded_while_those_who_are_alike_may_not_be_heard_yet() -> None:
    """Ten of twelve clients are known, fewer than nine tenths."""
    guard = FilterProtection()
    rounds_without_mates(guard, 6, awaited=12)
    assert not guard.state.excluded
    assert not guard.state.records
    # The eleventh client agrees with the odd one, which was no attacker.
    judge(guard, "late", along(5), 10.0, home, 12)
    rounds_without_mates(guard, 6, awaited=12)
    assert not guard.state.excluded
    assert guard.state.records["odd"].score > 1.0


def test_who_is_just_heard_counts_among_those_that_are_known() -> None:
    """Nine of ten clients are nine tenths; the ninth counts from its first update."""
    guard = FilterProtection()
    for index in range(8):
        judge(guard, f"c{index}", along(0), 10.0, home, 10)
    assert not guard.state.records
    judge(guard, "c8", along(0), 10.0, home, 10)
    assert list(guard.state.records) == ["c8"]


def test_once_most_are_heard_who_agrees_with_nobody_is_excluded() -> None:
    guard = FilterProtection()
    # Ten of eleven clients are more than nine tenths.
    rounds_without_mates(guard, 4, awaited=11)
    assert list(guard.state.excluded) == ["odd"]


def test_clients_that_stay_silent_are_not_waited_for_without_end() -> None:
    """The wait ends after ten updates per client of twenty: 200, or twenty rounds of ten."""
    guard = FilterProtection()
    rounds_without_mates(guard, 20, awaited=20)
    assert not guard.state.records
    rounds_without_mates(guard, 3, awaited=20)
    assert list(guard.state.excluded) == ["odd"]


def test_of_a_large_fleet_no_more_are_waited_for_than_are_remembered() -> None:
    guard = FilterProtection(FilterOptions(protection_window=10))
    rounds_without_mates(guard, 4, awaited=1000)
    assert list(guard.state.excluded) == ["odd"]


def test_a_group_of_its_own_is_not_excluded() -> None:
    twins = {"t1": along(5), "t2": along(5) + along(6, 0.2)}
    assert fleet_of(FilterProtection(), 10, **twins) == []


def test_in_another_cluster_directions_are_another_matter() -> None:
    guard = FilterProtection()
    assert fleet_of(guard, 10, x1=along(5), x2=along(0, -1)) == []
    assert "x1" not in guard.state.records


def test_an_excluded_client_whose_updates_come_to_agree_is_let_in_again() -> None:
    guard = FilterProtection()
    fleet_of(guard, 4, odd=along(5))
    verdicts = [judge(guard, "odd", along(0), 10.0, home).verdict for _ in range(8)]
    assert verdicts[0] is Verdict.REFUSED
    assert Verdict.READMITTED in verdicts
    assert verdicts[-1] is Verdict.ACCEPTED
    assert not guard.state.excluded


@pytest.mark.parametrize(("guard", "left"), [(FilterProtection(), 1.0), (TrustProtection(), 2.0)])
def test_the_update_of_a_client_that_is_let_in_again_is_cut_like_any_other(
    guard: Guard, left: float
) -> None:
    fleet_of(guard, 4, one_model=True, odd=along(5))
    typical = statistics.median(guard.state.lengths[f"c{index}"] for index in range(6))
    rulings = [judge(guard, "odd", along(0, 100.0), 10.0, home, awaited=7) for _ in range(8)]
    (again,) = [ruling for ruling in rulings if ruling.verdict is Verdict.READMITTED]
    assert 100.0 * again.scale == pytest.approx(left * typical)


def test_a_fleet_that_agrees_on_nothing_excludes_nobody() -> None:
    guard = FilterProtection()
    # Two clients oppose each other, and ten differ from all: the median client agrees with none.
    sent = [along(0, -1), *(along(index) for index in range(11))]
    for _ in range(5):
        for index, vector in enumerate(sent):
            assert judge(guard, f"c{index}", vector, 10.0, home).verdict is Verdict.ACCEPTED
    assert guard.state.records["c0"].score == pytest.approx(-1.0)


def test_the_agreement_is_the_largest_cosine_and_the_balance_of_the_strong_ones() -> None:
    guard = FilterProtection()
    guard.state.directions = {"a": along(0), "b": along(0, -1), "c": along(1)}
    direction = np.asarray(along(0, 0.8) + along(1, 0.6), np.float32)
    # Cosines 0.8, −0.8 and 0.6: balance (0.64 − 0.64 + 0.36) / (0.64 + 0.64 + 0.36).
    agreement = guard._agreement(direction, ["a", "b", "c"])
    assert agreement == pytest.approx(0.8 + 0.36 / 1.64, abs=1e-6)
    assert guard._agreement(along(5), ["a", "b", "c"]) == 0.0


def test_a_record_weighs_updates_by_their_length_and_forgets() -> None:
    record = Record()
    record.add(1.0, 3.0)
    record.add(-1.0, 1.0)
    assert record.score == pytest.approx((0.9 * 3.0 - 1.0) / (0.9 * 3.0 + 1.0))
    assert Record().score == 0.0


def test_a_scaled_update_weighs_no_more_than_what_is_left_of_it() -> None:
    """A length of 1000 is scaled to 1, and does not outweigh the previous update."""
    guard = FilterProtection()
    for index in range(FEWEST):
        judge(guard, f"c{index}", along(0), 10.0, home)
    judge(guard, "new", along(0), 10.0, home)
    assert judge(guard, "new", along(5, 1000.0), 10.0, home).verdict is Verdict.SCALED
    # It agrees fully, then not at all: (0.9 · 1 · 2 + 1 · 0) / (0.9 · 1 + 1).
    assert guard.state.records["new"].score == pytest.approx(1.8 / 1.9)


def test_an_update_that_moves_nothing_is_accepted() -> None:
    guard = FilterProtection()
    for index in range(8):
        ruling = judge(guard, f"c{index}", along(0, 0.0), 10.0, home)
        assert ruling.verdict is Verdict.ACCEPTED
        assert math.isnan(ruling.measured)
    # An update of zeros has no direction to compare with.
    assert not guard.state.directions
    assert not guard.state.records


# Trust: against attackers that know the filter.


def near(axis: int, other: int, share: float, length: float = 1.0) -> np.ndarray:
    """Return a vector along one axis, with a part along another."""
    vector = along(axis) * np.float32(1 - share**2) ** 0.5 + along(other, share)
    return np.asarray(vector * np.float32(length))


def test_trust_cuts_an_update_to_the_bound_of_its_cluster() -> None:
    guard = TrustProtection(TrustOptions(protection_length=2.0))
    for client, length in {**FIVE, "x0": 0.1, "x1": 0.2, "x2": 0.3}.items():
        guard.state.lengths[client] = length
    # The median of three lengths in a small cluster is 0.2, whatever other clusters' lengths are.
    ruling = judge(guard, "x3", along(1, 0.5), 10.0, home)
    assert (ruling.verdict, ruling.bound) == (Verdict.SCALED, pytest.approx(0.4))
    assert ruling.scale == pytest.approx(0.8)
    # With two lengths the shorter one counts; with none the model's.
    guard.state.lengths = {"a": 3.0, "b": 1.0}
    assert judge(guard, "c", along(1, 9.0), 10.0, home).bound == pytest.approx(2.0)
    guard.state.lengths = {}
    assert judge(guard, "d", along(1, 99.0), 10.0, home).verdict is Verdict.ACCEPTED
    guard.state.lengths = {}
    assert judge(guard, "e", along(1, 101.0), 10.0, home).bound == pytest.approx(100.0)


def test_those_that_oppose_their_likes_are_contradicted_in_any_order() -> None:
    honest = [near(0, axis, 0.3) for axis in range(1, 6)]
    against = -along(0)
    assert contradiction(np.stack([against, *honest]))[0] == pytest.approx(-5 * 0.91, rel=1e-3)
    # The attacker alone contradicts each of them, but together they support each other.
    for one in honest:
        rest = [other for other in honest if other is not one]
        assert contradiction(np.stack([one, against, *rest]))[0] == 0.0
    # Two attackers support each other, but are too few.
    assert contradiction(np.stack([against, against, *honest]))[0] < -0.5


def test_groups_with_nothing_in_common_contradict_nobody() -> None:
    groups = [near(2 * group, 2 * group + 1, 0.4) for group in range(4) for _ in range(3)]
    assert contradiction(np.stack(groups))[0] == 0.0


def test_what_is_slightly_against_everybody_is_contradicted_too() -> None:
    """Each cosine is −0.29, too small for a vote; the cosine with the mean of the twelve is −1."""
    honest = [along(axis) for axis in range(12)]
    against = -np.sum(honest, axis=0) / np.float32(12**0.5)
    assert -0.3 < float(against @ honest[0]) < -0.28
    assert contradiction(np.stack([against, *honest]))[0] < -0.5
    assert contradiction(np.stack([honest[0], against, *honest[1:]]))[0] == 0.0


def test_clients_that_send_alike_have_one_vote() -> None:
    """Twelve honest clients have nothing in common; four send minus their mean, with noise."""
    honest = [along(axis) for axis in range(12)]
    back = -np.sum(honest, axis=0) / np.float32(12**0.5)
    four = [np.float32(0.98) * back + along(12 + one, 0.2) for one in range(4)]
    # With a vote each, their mutual support of 3 · 0.96 would outweigh the twelve.
    for one in four:
        rest = [other for other in four if other is not one]
        assert contradiction(np.stack([one, *rest, *honest]))[0] < 0.0
    for one in honest:
        rest = [other for other in honest if other is not one]
        assert contradiction(np.stack([one, *four, *rest]))[0] == 0.0


def test_the_centre_is_of_clients_that_send_something_else() -> None:
    """Three colluders along (−0.6, 0.8) against four clients along (1, 0): their cosine is −0.6."""
    against, honest = along(1, 0.8) - along(0, 0.6), along(0)
    back, cosine = opposed(against, np.stack([against, against, *[honest] * 4]))
    # Updates equal to the judged one have the weight 1 − 1 = 0: the centre is (1, 0).
    assert cosine == pytest.approx(-0.6)
    np.testing.assert_allclose(back[:3], [-0.6, 0.0, 0.0], atol=1e-6)
    # For an honest client the centre is the three alone, (−0.6, 0.8), with the cosine −0.6.
    assert opposed(honest, np.stack([*[against] * 3, *[honest] * 3]))[1] == pytest.approx(-0.6)
    assert opposed(honest, honest[np.newaxis])[1] == 0.0


def test_what_points_back_is_taken_off_an_update_with_one_model() -> None:
    """(−0.28, 0.96) at length 2 is reduced to (0, 1.92); with clusters nothing changes."""
    for awaited in (9, 0):
        guard = TrustProtection()
        for client in range(8):
            judge(guard, f"c{client}", near(0, client + 2, 0.3), 10.0, lambda _: 0, awaited)
        honest = np.stack([guard.state.directions[f"c{client}"] for client in range(8)])
        centre = honest.mean(axis=0) / np.linalg.norm(honest.mean(axis=0))
        sent = 2 * (along(1, 0.96) - np.float32(0.28) * centre)
        ruling = judge(guard, "x", sent, 10.0, lambda _: 0, awaited)
        if not awaited:
            assert ruling.verdict is Verdict.ACCEPTED
        else:
            assert ruling.measured == pytest.approx(-0.28, abs=1e-3)
            assert ruling.weights is not None
            np.testing.assert_allclose(ruling.weights, along(1, 1.92), atol=1e-2)


def test_those_that_are_contradicted_have_no_say_in_the_centre() -> None:
    """Weighted by 1 − c, three would outweigh nine honest clients, whose cosines are 0.91."""
    guard = TrustProtection()
    for client in range(12):
        sent = near(0, client + 2, 0.3) if client < 9 else -along(0)
        guard.state.lengths[f"c{client}"] = 1.0
        guard.state.directions[f"c{client}"] = sent
    ruling = judge(guard, "new", near(0, 1, 0.3), 10.0, lambda _: 0, awaited=13)
    assert ruling.verdict is Verdict.ACCEPTED


def trusted(first: int) -> list[Verdict]:
    """Return the verdicts on an attacker's updates in one model, from its update `first` on."""
    guard, verdicts = TrustProtection(), []
    for turn in range(6):
        for client in range(8):
            sent = near(0, client + 1, 0.3)
            if client == 7 and turn >= first:
                sent = -sent
            ruling = judge(guard, f"c{client}", sent, 10.0, lambda _: 0, awaited=8)
            if client == 7:
                verdicts.append(ruling.verdict)
            else:
                assert ruling.verdict is Verdict.ACCEPTED, (turn, client)
    return verdicts


def test_a_long_record_does_not_cover_a_contradicted_update() -> None:
    accepted, refused = Verdict.ACCEPTED, Verdict.REFUSED
    assert trusted(first=4) == [accepted] * 4 + [refused, Verdict.EXCLUDED]
    assert trusted(first=0)[0] is refused
    assert Verdict.EXCLUDED in trusted(first=0)


def pulsing(turns: int, attacks: Callable[[int], bool]) -> list[Verdict]:
    """Return the verdicts on the updates of one of eight clients of one model, turn by turn."""
    guard, found = TrustProtection(TrustOptions(protection_share=0.1)), list[Verdict]()
    for turn in range(turns):
        for client in range(8):
            sent = near(0, client + 1, 0.3)
            opposes = client == 7 and attacks(turn)
            was_excluded = "c7" in guard.state.excluded
            ruling = judge(guard, f"c{client}", -sent if opposes else sent, 10.0, same, 8)
            if client == 7:
                found.append(ruling.verdict)
                is_let_in = was_excluded and "c7" not in guard.state.excluded
                assert is_let_in == (ruling.verdict is Verdict.READMITTED), turn
    return found


def test_a_client_that_is_often_contradicted_is_kept_out_altogether() -> None:
    # One of three, by weights that decay: 0.9 / 3.44 at turn 3, then 0.81 / 4.1, (0.9 + 0.66) / 5.2
    # at turn 6, 1.4 / 5.7, and more than a quarter later on.
    accepted, out = Verdict.ACCEPTED, Verdict.REFUSED
    one_in_three = pulsing(16, lambda turn: turn % 3 == 2)
    assert one_in_three[:8] == [accepted] * 2 + ([out] * 2 + [accepted]) * 2
    assert one_in_three[8:] == [out] * 8
    # An attack in one of eight updates is refused itself, and has no further consequences.
    costs = pulsing(24, lambda turn: turn % 8 == 7)
    assert costs == ([accepted] * 7 + [out]) * 3


def test_a_former_opponent_is_let_in_again_once_and_is_told() -> None:
    found = pulsing(40, lambda turn: turn < 6)
    assert Verdict.EXCLUDED in found[:6]
    assert found.count(Verdict.READMITTED) == 1
    assert set(found[-12:]) == {Verdict.ACCEPTED}


def test_with_clusters_contradicted_updates_are_shortened() -> None:
    """Of twelve clients in a cluster four push back, and no record says so yet."""
    guard = TrustProtection(TrustOptions(protection_share=0.3))
    sent = {f"c{client}": near(0, client + 4, 0.4) for client in range(4, 12)}
    for client in range(4):
        sent[f"c{client}"] = near(1, client + 4, 0.2) * np.float32(0.6) - along(0, 0.8)
    for client, update in sent.items():
        assert not judge(guard, client, update, 10.0, home, online=12).verdict.is_withheld
    ruling = judge(guard, "c0", sent["c0"], 10.0, home, online=12)
    assert (ruling.verdict, ruling.scale) == (Verdict.SCALED, pytest.approx(0.3, rel=0.05))
    assert "contradict" in ruling.reason
    assert judge(guard, "c4", sent["c4"], 10.0, home, online=12).verdict is Verdict.ACCEPTED


def test_clients_that_are_gone_have_no_vote() -> None:
    """Nine clients sent the opposite, once each, and left; six honest clients are online."""
    guard, honest = TrustProtection(), [f"c{client}" for client in range(6)]
    for client in range(6):
        judge(guard, f"c{client}", near(0, client + 1, 0.3), 10.0, same, 7)
    for gone in range(9):
        guard.state.lengths[f"s{gone}"] = 9.0
        guard.state.directions[f"s{gone}"] = near(0, gone + 6, 0.9) * np.float32(-1)
    ruling = judge(guard, "c0", near(0, 1, 0.3, 4.0), 10.0, same, 7, present={"c0", *honest})
    # Their lengths do not count either.
    assert (ruling.verdict, ruling.bound) == (Verdict.SCALED, pytest.approx(2.0))
    guard.state.lengths["c0"] = 1.0
    assert judge(guard, "c0", near(0, 1, 0.3), 10.0, same, 7).verdict.is_withheld


def test_new_identities_share_one_record() -> None:
    guard = TrustProtection()
    for turn in range(32):
        sent = near(0, turn % 4 + 1, 0.3)
        judge(guard, f"c{turn % 8}", sent, 10.0, lambda _: 0, awaited=8)

    def first(client: str, sent: Vector) -> Ruling:
        return judge(guard, client, sent, 10.0, lambda _: 0, awaited=8)

    # Each is the first update of a new client, and
    # agrees with no other: one alone would be accepted.
    verdicts = [first(f"s{axis}", along(axis)).verdict for axis in range(5, 16)]
    refused = verdicts.index(Verdict.REFUSED)
    assert 0 < refused < 8
    assert set(verdicts[refused:]) == {Verdict.REFUSED}
    # No client is excluded for others' updates, and honest updates restore the record.
    honest = [first("new", near(0, 1, 0.3)) for _ in range(3)]
    assert [ruling.verdict for ruling in honest] == [
        *(Verdict.REFUSED, Verdict.ACCEPTED, Verdict.ACCEPTED)
    ]
    assert "new clients agree with no others" in honest[0].reason
    assert not guard.state.excluded


def test_equal_updates_bear_nobody_out() -> None:
    """Four of twelve push in one direction, which the filter takes for a group."""

    def excluded(guard: Guard, noise: float) -> set[str]:
        for _ in range(8):
            for client in range(12):
                own = near(0, client + 2, 0.4)
                push = near(1, 14 + client % 2, noise)
                judge(guard, f"c{client}", push if client < 4 else own, 10.0, lambda _: 0, 12)
        return set(guard.state.excluded)

    colluding = {"c0", "c1", "c2", "c3"}
    assert excluded(TrustProtection(), 0.0) == colluding
    assert not excluded(FilterProtection(), 0.0)
    # As docs/protection.md says, a little noise defeats this.
    assert not excluded(TrustProtection(), 0.2)


def test_with_clusters_trust_shortens_the_updates_of_an_excluded_client() -> None:
    """It may be an honest client in the wrong cluster."""
    guard, flips = TrustProtection(TrustOptions(protection_share=0.3)), along(15)
    assert fleet_of(guard, 6, flips=flips) == ["flips"]
    typical = statistics.median(guard.state.lengths[f"c{index}"] for index in range(6))
    ruling = judge(guard, "flips", flips * 5, 10.0, home)
    assert ruling.verdict is Verdict.SCALED
    assert ruling.measured == guard.state.records["flips"].score < ruling.bound
    assert 5 * ruling.scale == pytest.approx(0.3 * typical)
    # An update that is short enough is not scaled, and the client can be readmitted.
    assert judge(guard, "flips", flips * 0.1, 10.0, home).scale == 1.0
    verdicts = [judge(guard, "flips", along(0), 10.0, home).verdict for _ in range(12)]
    assert Verdict.READMITTED in verdicts
    # With a single model all its updates are refused.
    alone = TrustProtection()
    assert fleet_of(alone, 6, one_model=True, flips=flips) == ["flips"]
    assert judge(alone, "flips", flips, 10.0, home, awaited=7).verdict is Verdict.REFUSED


def test_with_clusters_trust_waits_for_those_that_an_honest_client_would_agree_with() -> None:
    """Seven of eight online clients are fewer than nine tenths."""
    flips = along(0, -1)
    guard = TrustProtection()
    fleet_of(guard, 6, online=8, flips=flips)
    assert not guard.state.records
    # The eighth client agrees, so that the others have not been taken for attackers.
    judge(guard, "slow", flips + along(3, 0.2), 10.0, home, online=8)
    fleet_of(guard, 6, online=8, flips=flips)
    assert guard.state.records["flips"].score > 0.0
    guard = TrustProtection()
    fleet_of(guard, 6, online=7, flips=flips)
    assert guard.state.records["flips"].score < 0.0


def test_a_client_in_a_wrong_cluster_is_borne_out_by_those_elsewhere() -> None:
    guard = TrustProtection()
    for _ in range(6):
        for client in range(6):
            judge(guard, f"c{client}", near(0, client + 2, 0.3), 10.0, home)
            judge(guard, f"x{client}", near(1, client + 9, 0.3), 10.0, home)
        lost = judge(guard, "x9", near(0, 8, 0.3), 10.0, home)
        assert not lost.verdict.is_withheld


def test_with_proxy_sets_an_update_must_gain_nearly_as_much_as_those_of_others() -> None:
    guard = TrustProtection(TrustOptions(protection_share=0.4))

    def judged(client: str, gain: float, length: float = 1.0) -> Verdict:
        sent = along(0, length)
        return judge(guard, client, sent, 10.0, home, awaited=9, gain=lambda: gain).verdict

    # While few clients are known, directions decide.
    for client in range(FEWEST):
        assert judged(f"c{client}", 0.5 if client else -0.5) is Verdict.ACCEPTED
    assert judged("c0", 0.5) is Verdict.ACCEPTED
    # The median client gains 0.5, of which the required share 0.4 is 0.2.
    assert judged("x", 0.19) is Verdict.REFUSED
    assert judged("y", 0.21) is Verdict.ACCEPTED
    assert judged("z", 0.5, length=9.0) is Verdict.SCALED


def test_where_no_update_gains_the_proxy_sets_say_nothing() -> None:
    guard = TrustProtection()
    for gain in (0.1, -0.1, 0.15, 0.1, 0.1, 0.1, -0.3):
        ruling = judge(guard, f"{gain}", along(0), 10.0, home, 9, lambda gain=gain: gain)
        assert ruling.verdict is Verdict.ACCEPTED


def test_with_clusters_the_proxy_sets_are_not_asked() -> None:
    guard = TrustProtection()
    ruling = judge(guard, "c0", along(0), 10.0, home, awaited=0, gain=lambda: -1.0)
    assert ruling.verdict is Verdict.ACCEPTED


def test_the_gain_is_the_largest_share_of_a_sets_loss_that_goes() -> None:
    """Losses are the distances from 1 and from 4; each set has two equal samples."""

    def losses(models: Sequence[Vector], proxy: int) -> np.ndarray:
        return np.array([[abs(model[0] - (1.0, 4.0)[proxy])] * 2 for model in models], np.float32)

    def gain(before: float, after: float) -> float:
        return gain_of(losses, 2, along(0, before), along(0, after))

    assert gain(2.0, 3.0) == pytest.approx(0.5)
    assert gain(2.0, 1.5) == pytest.approx(0.5)
    assert gain(0.0, -0.5) == pytest.approx(-0.125)
    assert gain(0.0, -90.0) == -1.0
    assert gain(0.0, math.nan) == -1.0

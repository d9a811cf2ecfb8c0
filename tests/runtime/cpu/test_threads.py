"""As many threads as are quick."""

from __future__ import annotations

from collections import Counter

from allyouneed.runtime.cpu.threads import LATE, SOON, TRIES, Team


def taken(team: Team, passes: int, seconds: dict[int, float]) -> Counter[int]:
    sizes: Counter[int] = Counter()
    for _ in range(passes):
        size = team.size
        sizes[size] += 1
        team.took(size, seconds[size])
    return sizes


def test_all_of_them_where_they_are_quicker() -> None:
    sizes = taken(Team(4), 10_000, {4: 1.0, 1: 1.5})
    assert sizes[4] > 9_000


def test_one_where_they_are_in_each_others_way() -> None:
    """Who is slower is asked once, and then not for long."""
    for seconds in (50.0, 1.1):
        assert taken(Team(4), 10_000, {4: seconds, 1: 1.0})[4] < 10


def test_a_machine_that_gets_busy_and_quiet_again() -> None:
    team = Team(2)
    assert taken(team, 1_000, {2: 1.0, 1: 1.5})[2] > 900
    assert taken(team, 10_000, {2: 20.0, 1: 1.5})[2] < 20
    taken(team, LATE, {2: 1.0, 1: 1.5})
    assert taken(team, 1_000, {2: 1.0, 1: 1.5})[2] > 900


def test_a_pass_that_is_held_up_sends_them_away() -> None:
    team = Team(2)
    taken(team, TRIES, {1: 1.5})
    for seconds in (1.0, 1.0, 1.0, 1.4):
        assert team.size == 2
        team.took(2, seconds)
    team.took(2, 30.0)
    assert team.size == 1 and team.left == SOON


def test_one_thread_is_one() -> None:
    assert taken(Team(1), 100, {1: 1.0}) == {1: 100}

"""Random schedules: whatever happens in whatever order, the state machine keeps what DESIGN promises.

Hypothesis invents a setting and a list of moves; see ``cycle_world`` for what each does and what is checked
after it. A failing schedule is printed as values that can be pasted into an ``@example`` here.
"""

from __future__ import annotations

import pytest
from cycle_world import MOVES, Move, Setting, World
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def setting(draw: st.DrawFn) -> Setting:
    active, spares = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return Setting(
        active=active,
        spares=spares,
        slots=draw(st.integers(1, 2)),
        max_restarts=draw(st.sampled_from([0, 1, 3, 10])),
        first_cycle=draw(st.sampled_from([0, 7])),
        here=draw(st.sampled_from([active + spares, active + spares, active, 0])),
    )


weighted = [what for what, (weight, _) in MOVES.items() for _ in range(weight)]
moves = st.builds(Move, st.sampled_from(weighted), st.integers(0, 11), st.integers(0, 11))


@given(setting=setting(), schedule=st.lists(moves, max_size=60))
@settings(max_examples=3000, deadline=None)
@pytest.mark.timeout(300)
def test_no_schedule_breaks_a_promise(setting: Setting, schedule: list[Move]) -> None:
    world = World(setting)
    for move in schedule:
        world.play(move)
    world.play_to_the_end()

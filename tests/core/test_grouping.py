"""Groups of ops: always a partition, always in an order that runs, merged whenever that can be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.core.rewrite.grouping import Groups, needed_by, topological_order

Needs = list[set[int]]


@st.composite
def dags(draw: st.DrawFn) -> Needs:
    """The dependencies of each op: some of the earlier ones."""
    count = draw(st.integers(1, 12))
    return [draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(count)]


def edges(needs: Needs) -> list[tuple[int, int]]:
    return [(needed, op) for op, each in enumerate(needs) for needed in sorted(each)]


def is_reached(start: int, goal: int, following: dict[int, set[int]]) -> bool:
    """True if a path leads from one group to another through a third."""
    stack = [group for group in following[start] if group != goal]
    seen = set(stack)
    while stack:
        after = following[stack.pop()]
        if goal in after:
            return True
        stack += after - seen
        seen |= after
    return False


def following_groups(needs: Needs, groups: Groups) -> dict[int, set[int]]:
    """By group, those that need one of its ops."""
    found: dict[int, set[int]] = {group: set() for group in groups.members}
    for first, second in edges(needs):
        a, b = groups.group_of(first), groups.group_of(second)
        if a != b:
            found[a].add(b)
    return found


def check(needs: Needs, groups: Groups) -> None:
    """A partition of the ops, in an order in which all that a group needs comes before it."""
    order = groups.order()
    assert sorted(order) == sorted(groups.members)
    assert sorted(op for each in groups.members.values() for op in each) == [*range(len(needs))]
    for group, members in groups.members.items():
        assert members == sorted(members)
        assert all(groups.group_of(op) == group for op in members)
    place = {group: index for index, group in enumerate(order)}
    for first, second in edges(needs):
        assert place[groups.group_of(first)] <= place[groups.group_of(second)]


@settings(max_examples=300)
@given(dags(), st.randoms(use_true_random=False))
def test_edges_are_merged_exactly_where_no_cycle_comes_of_it(needs: Needs, random: object) -> None:
    groups = Groups(needs)
    check(needs, groups)
    waiting = edges(needs) * 2  # what was refused once is refused again, or not
    random.shuffle(waiting)  # type: ignore[attr-defined]
    for first, second in waiting:
        a, b = groups.group_of(first), groups.group_of(second)
        may_be = a == b or not is_reached(a, b, following_groups(needs, groups))
        assert groups.merge(first, second) == may_be
        assert (groups.group_of(first) == groups.group_of(second)) == may_be
        check(needs, groups)


def test_a_way_around_is_in_the_way() -> None:
    """0 → 1 → 2 and 0 → 2: the ends cannot be one without what is between them."""
    groups = Groups([set(), {0}, {0, 1}])
    assert not groups.merge(0, 2)
    assert groups.merge(0, 1)
    assert groups.merge(0, 2)
    assert groups.order() == [groups.group_of(0)]
    assert groups.members == {0: [0, 1, 2]}


def test_what_does_not_need_the_first_moves_before_it() -> None:
    groups = Groups([set(), set(), {0}, {0, 1}, {1}])
    assert groups.merge(0, 3)
    assert groups.order() == [1, 0, 2, 4]
    assert groups.members[0] == [0, 3]


def test_transitive_dependencies() -> None:
    assert needed_by([[], [0], [], [1]], 3) == {0, 1}
    assert needed_by([[], [0], [], [1]], 2) == set()


@given(dags(), st.randoms(use_true_random=False))
def test_a_topological_order_takes_the_first_op_that_can_run(needs: Needs, random: object) -> None:
    assert topological_order([[2], [], []]) == [1, 2, 0]
    assert topological_order(needs) == list(range(len(needs)))
    names = list(range(len(needs)))
    random.shuffle(names)  # type: ignore[attr-defined]
    renamed: Needs = [set() for _ in needs]
    for op, each in enumerate(needs):
        renamed[names[op]] = {names[other] for other in each}
    expected: list[int] = []
    while len(expected) < len(needs):
        can_run = [op for op, each in enumerate(renamed) if each.issubset(expected)]
        expected.append(min(set(can_run).difference(expected)))
    assert topological_order(renamed) == expected

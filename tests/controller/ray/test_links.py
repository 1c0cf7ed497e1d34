"""Slow links to nodes: which ones are slow, and pools that use their nodes last."""

import pytest

from hybridflow.controller.ray.links import NO_LINK, Link, find_slow_links
from hybridflow.controller.ray.nodes import Node, choose_nodes

FAST, SLOW, NARROW = Link(0.0005, 1e9), Link(0.05, 1e9), Link(0.0005, 1e8)


@pytest.mark.parametrize(
    ("links", "slow"),
    [
        ({"a": FAST, "b": FAST, "c": SLOW}, ["c"]),
        ({"a": FAST, "b": NARROW, "c": FAST}, ["b"]),
        ({"a": SLOW, "b": SLOW, "c": SLOW}, []),
        ({"a": FAST, "b": Link(0.0049, 5e8)}, []),
        ({"a": NO_LINK, "b": FAST}, ["a"]),
        ({"a": NO_LINK, "b": NO_LINK}, []),
        ({"a": SLOW}, []),
        ({}, []),
    ],
)
def test_a_link_is_slow_compared_with_the_others(links, slow):
    assert list(find_slow_links(links)) == slow


def nodes_with(*cpus):
    return [Node(str(n), f"10.0.0.{n}", {"CPU": count}, {"CPU": count}) for n, count in enumerate(cpus, start=1)]


@pytest.mark.parametrize(
    ("processes", "used_last", "chosen"),
    [
        ([2], {"1"}, ["2"]),
        ([2, 2], {"1"}, ["2", "3"]),
        ([2, 2], {"1", "2"}, ["3", "1"]),  # one that is fast, then by address
        ([2, 2, 2], {"1"}, ["2", "3", "1"]),
        ([4], {"1"}, None),
        ([1], {"1", "2", "3"}, ["1"]),
    ],
)
def test_nodes_with_slow_links_are_chosen_last(processes, used_last, chosen):
    found = choose_nodes(processes, {"CPU": 1.0}, nodes_with(2, 2, 2), used_last=used_last)
    assert chosen == (found and [node.node_id for node in found])


def test_a_node_with_a_slow_link_is_used_if_only_it_is_large_enough():
    found = choose_nodes([4], {"CPU": 1.0}, nodes_with(4, 2, 2), used_last={"1"})
    assert found
    assert [node.node_id for node in found] == ["1"]

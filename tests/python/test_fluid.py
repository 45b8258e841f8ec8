"""Fluid flows: max-min fair, against progressive filling over all flows at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer._fluid import FluidNetwork

Uses = list[tuple[int, float]]


def progressive_filling(capacities: list[float], flows: list[Uses]) -> list[float]:
    """All rates grow together; where a resource is full its flows stop."""
    weights = np.zeros((len(capacities), max(len(flows), 1)))
    for flow, uses in enumerate(flows):
        for resource, weight in uses:
            weights[resource, flow] += weight
    left = np.array(capacities, float)
    rates = np.zeros(len(flows))
    active = np.ones(len(flows), bool)
    while active.any():
        load = weights[:, : len(flows)][:, active].sum(axis=1)
        steps = np.where(load > 0, left / np.maximum(load, 1e-300), math.inf)
        step = steps.min()
        rates[active] += step
        left = left - load * step
        full = steps <= step * (1 + 1e-12)
        active &= ~(weights[full][:, : len(flows)] > 0).any(axis=0)
    return rates.tolist()


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[float], list[Uses]]:
    capacities = draw(st.lists(st.floats(1, 1000), min_size=1, max_size=6))
    resources = range(len(capacities))
    uses = st.lists(st.sampled_from(resources), min_size=1, unique=True).flatmap(
        lambda chosen: st.tuples(*(st.tuples(st.just(r), st.floats(0.5, 3)) for r in chosen))
    )
    flows = draw(st.lists(uses.map(list), min_size=1, max_size=12))
    return capacities, flows


@settings(max_examples=300, deadline=None)
@given(networks(), st.data())
def test_rates_are_max_min_fair_whatever_came_and_went(
    network: tuple[list[float], list[Uses]], data: st.DataObject
) -> None:
    capacities, flows = network
    fluid = FluidNetwork()
    for capacity in capacities:
        fluid.add_resource(capacity)
    running: dict[int, Uses] = {}
    for uses in flows:
        running[fluid.start(0.0, 1e12, uses, None)] = uses
        if data.draw(st.booleans()) and len(running) > 1:
            gone = data.draw(st.sampled_from(sorted(running)))
            fluid.stop(0.0, gone)
            del running[gone]
        wanted = progressive_filling(capacities, list(running.values()))
        assert [fluid.rate(i) for i in running] == pytest.approx(wanted, rel=1e-6)
    assert fluid.num_flows == len(running)


def drain(fluid: FluidNetwork) -> list[tuple[float, object]]:
    out = []
    while (now := fluid.next_time()) < math.inf:
        out.append((now, fluid.finished(now)))
    return out


def test_two_flows_share_and_the_second_speeds_up_when_the_first_is_through() -> None:
    fluid = FluidNetwork()
    disk = fluid.add_resource(10.0)
    fluid.start(0.0, 20.0, [(disk, 1.0)], "small")
    fluid.start(0.0, 60.0, [(disk, 1.0)], "large")
    assert drain(fluid) == [(pytest.approx(4.0), "small"), (pytest.approx(8.0), "large")]
    assert fluid.moved_by(disk) == pytest.approx(80.0)


def test_what_one_cannot_use_goes_to_the_others() -> None:
    fluid = FluidNetwork()
    wide, narrow = fluid.add_resource(100.0), fluid.add_resource(10.0)
    slow = fluid.start(0.0, 1e9, [(wide, 1.0), (narrow, 1.0)], None)
    fast = fluid.start(0.0, 1e9, [(wide, 1.0)], None)
    capped = fluid.start(0.0, 1e9, [(wide, 1.0)], None, most=5.0)
    assert [fluid.rate(i) for i in (slow, fast, capped)] == pytest.approx([10.0, 85.0, 5.0])


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 100)), min_size=1, max_size=20))
def test_a_saturated_resource_works_without_a_pause(arrivals: list[tuple[float, float]]) -> None:
    fluid = FluidNetwork()
    disk = fluid.add_resource(7.0)
    now = busy_until = 0.0
    for at, size in sorted(arrivals):
        while fluid.next_time() <= at:
            now = fluid.next_time()
            fluid.finished(now)
        fluid.start(at, size, [(disk, 1.0)], None)
        busy_until = max(busy_until, at) + size / 7.0
    ends = drain(fluid)
    last = ends[-1][0] if ends else now
    assert last == pytest.approx(busy_until, rel=1e-6)


def test_nonsense_is_refused_and_leaves_nothing() -> None:
    fluid = FluidNetwork()
    with pytest.raises(ValueError, match="capacity"):
        fluid.add_resource(0.0)
    disk = fluid.add_resource(1.0)
    for uses in ([], [(disk, 0.0)], [(7, 1.0)], [(-1, 1.0)], [(disk, 1.0)] * 9):
        with pytest.raises(ValueError, match=r"resource|uses"):
            fluid.start(0.0, 1.0, uses, None)
    with pytest.raises(ValueError, match="size"):
        fluid.start(0.0, -1.0, [(disk, 1.0)], None)
    assert fluid.num_flows == 0
    assert fluid.next_time() == math.inf
    assert fluid.finished(5.0) is None
    flow = fluid.start(0.0, 10.0, [(disk, 1.0)], None)
    assert fluid.stop(4.0, flow) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="no flow"):
        fluid.stop(4.0, flow)

"""The simulator: conservation, order, known answers, and the paper's claims on a small scale."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.sim import (
    MODES,
    Agents,
    Hardware,
    Recorder,
    SimCluster,
    SimConfig,
    read_config,
    simulate,
)
from kvtransfer.sim.agents import arrivals, scripts
from kvtransfer.sim.kernel import Kernel
from kvtransfer.sim.prefill import prefill_time_model

SMALL = Agents(workload="32k", count=6, trajectories=6, max_turns=4)


def config(mode: str = "dualpath", agents: Agents = SMALL, **changes: Any) -> SimConfig:
    return SimConfig(mode=mode, agents=agents, **changes)


def run_cluster(what: SimConfig) -> tuple[SimCluster, Any]:
    recorder = Recorder()
    cluster = SimCluster(what, recorder)
    recorder.cluster = cluster
    cluster.run()
    return cluster, recorder.result()


# ---------------------------------------------------------------------------------- kernel


@given(st.lists(st.floats(0, 100), max_size=30))
def test_events_run_in_the_order_of_time_and_of_their_scheduling(times: list[float]) -> None:
    kernel = Kernel()
    seen: list[tuple[float, int]] = []
    for number, time in enumerate(times):
        kernel.at(time, lambda n: seen.append((kernel.now, n)), number)
    kernel.run()
    assert seen == sorted((time, number) for number, time in enumerate(times))


def test_a_run_stops_before_what_lies_behind_its_end() -> None:
    kernel = Kernel()
    seen: list[str] = []
    disk = kernel.fluid.add_resource(1.0)
    kernel.flow(5.0, [(disk, 1.0)], seen.append, "flow")
    kernel.at(2.0, seen.append, "early")
    kernel.at(9.0, seen.append, "late")
    kernel.run(6.0)
    assert seen == ["early", "flow"]
    kernel.run()
    assert seen == ["early", "flow", "late"]


# ---------------------------------------------------------------------------------- one turn


@pytest.mark.parametrize(
    ("mode", "sides"), [("pe", 1), ("de", 1), ("split", 2), ("oracle", math.inf)]
)
def test_a_lone_turn_takes_what_its_parts_take(mode: str, sides: float) -> None:
    agents = Agents(workload="64k", count=1, trajectories=1, max_turns=2)
    what = config(mode, agents)
    cluster, _ = run_cluster(what)
    script, hardware = cluster.scripts[0], what.hardware
    stage = cluster.recorder.stages[-1]
    assert stage.index == 1
    rate = hardware.snic_bytes_per_s * hardware.storage_efficiency
    whole = script.hit[1] * what.cost.stored_bytes_per_token / rate
    block = what.block_tokens * what.cost.stored_bytes_per_token / rate
    load = stage.loaded - stage.assigned
    assert load == pytest.approx(whole / sides, abs=block if sides == 2 else 1e-9)
    compute = prefill_time_model(what).seconds([(script.hit[1], script.new[1])])
    prefill = stage.first_token - stage.prefill_begin
    assert prefill >= compute * (1 - 1e-9)
    # All KV crosses the compute NICs twice on the PE path, under the computation or longer.
    across = 2.1 * (script.hit[1] + script.new[1]) * what.cost.stored_bytes_per_token
    assert prefill <= max(compute, across / hardware.cnic_bytes_per_s) + 1e-9
    assert 0 <= stage.assigned - stage.submitted <= what.fetch_period_s * (1 + 1e-9)
    moved = (script.hit[1] + script.new[1]) * what.cost.stored_bytes_per_token
    landing = 0 if mode == "oracle" else moved / hardware.cnic_bytes_per_s
    assert stage.landed - stage.first_token == pytest.approx(landing)


def test_without_layerwise_prefill_computing_begins_when_everything_is_in() -> None:
    agents = Agents(workload="64k", count=1, trajectories=1, max_turns=2)
    seconds = {}
    for mode in ("basic", "layerwise"):
        cluster, _ = run_cluster(config(mode, agents))
        stage = cluster.recorder.stages[-1]
        seconds[mode] = stage.first_token - stage.prefill_begin
        script = cluster.scripts[0]
    what = config("basic")
    compute = prefill_time_model(what).seconds([(script.hit[1], script.new[1])])
    kv_in = script.hit[1] * what.cost.stored_bytes_per_token / what.hardware.cnic_bytes_per_s
    assert seconds["basic"] >= compute + kv_in
    assert seconds["layerwise"] < seconds["basic"]


@pytest.mark.parametrize("generate", [1, 2, 5])
def test_decoding_takes_a_step_per_further_token(generate: int) -> None:
    what = config("oracle", Agents(workload="32k", count=1, trajectories=1, max_turns=1))
    cluster = SimCluster(what, Recorder())
    cluster.scripts[0].generate[0] = generate
    cluster.recorder.cluster = cluster
    cluster.run()
    stage = cluster.recorder.stages[0]
    steps = (stage.done - stage.landed) / what.hardware.step_overhead_s
    assert math.isclose(stage.done, stage.landed) if generate == 1 else steps > generate - 1


# ---------------------------------------------------------------------------------- the whole


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(MODES)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from([2e9, 1e11]),
)
def test_every_turn_runs_once_and_every_hit_token_is_read_once(
    mode: str, prefill: int, decode: int, count: int, turns: int, host_bytes: float
) -> None:
    agents = Agents(workload="32k", count=count, trajectories=5, max_turns=turns)
    what = config(
        mode,
        agents,
        prefill=prefill,
        decode=decode,
        hardware=Hardware(gpus_per_node=2, host_bytes=host_bytes),
    )
    cluster, result = run_cluster(what)
    lengths = [len(cluster.scripts[i % 5]) for i in range(count)]
    assert result.turns == sum(lengths)
    assert result.agents == count
    hits = sum(sum(cluster.scripts[i % 5].hit) for i in range(count))
    read = {node.name: node.read_tokens for node in cluster.nodes}
    if mode == "oracle":
        assert sum(read.values()) == 0
    else:
        assert sum(read.values()) == hits
    if MODES[mode].path == "pe":
        assert all(tokens == 0 for name, tokens in read.items() if name.startswith("de"))
    capacity = int(host_bytes / what.cost.stored_bytes_per_token)
    for node in cluster.nodes:
        assert node.free_tokens == capacity, "every buffer was given back"
        assert node.queued_tokens == 0
    for gpu in (*cluster.prefill.values(), *cluster.decode.values()):
        assert gpu.unfinished_requests == gpu.unfinished_tokens == 0
    assert all(gpu.free_tokens == gpu.capacity for gpu in cluster.decode.values())
    assert cluster.scheduler.waiting == 0
    assert cluster.active_agents == 0
    for stage in cluster.recorder.stages:
        times = (stage.submitted, stage.assigned, stage.loaded, stage.prefill_begin)
        assert list(times) == sorted(times)
        assert stage.prefill_begin < stage.first_token <= stage.landed <= stage.done
    bandwidth = what.hardware.snic_bytes_per_s * what.hardware.storage_efficiency
    readers = prefill + (decode if MODES[mode].path != "pe" else 0)
    if mode != "oracle":
        least = hits * what.cost.stored_bytes_per_token / bandwidth / readers
        assert result.jct_s >= least * (1 - 1e-9)


@pytest.mark.parametrize("until", [0.1, 1.0, 3.0])
def test_reads_that_wait_for_a_buffer_are_in_the_queue_that_is_reported(until: float) -> None:
    """Else the scheduler would take a side for idle whose buffers are full."""
    hardware = Hardware(gpus_per_node=2, snic_bytes_per_s=1e9, host_bytes=1e9)
    agents = Agents(workload="32k", count=40, trajectories=20)
    recorder = Recorder()
    cluster = SimCluster(config("dualpath", agents, hardware=hardware), recorder)
    recorder.cluster = cluster
    cluster.run(until)
    unread = dict.fromkeys((node.name for node in cluster.nodes), 0)
    for turn in cluster._turns.values():
        if turn.assigned and not turn.loaded:
            unread[(turn.decode if turn.decode_tokens else turn.prefill).node.name] += turn.hit
    assert {node.name: node.queued_tokens for node in cluster.nodes} == unread
    if until == 3.0:
        assert any(node.waiting for node in cluster.nodes), "buffers are short"


def test_the_same_configuration_gives_the_same_result_and_another_seed_another() -> None:
    what = config("split", Agents(workload="32k", rate=2.0, seconds=20, trajectories=8))
    first, second = simulate(what).to_json(), simulate(what).to_json()
    assert first == second
    other = msgspec.structs.replace(what, agents=msgspec.structs.replace(what.agents, seed=2))
    assert simulate(other).to_json() != first
    assert json.loads(json.dumps(first)) == first


# (JCT s, mean TTFT s, mean TPOT s, SNIC max/avg): what these runs gave when they were last looked at.
GOLDEN = {
    "basic": (153.368786972203, 3.134960274920209, 0.03813125869041045, 1.0),
    "dualpath": (149.953973497803, 0.6959328882131429, 0.038297684382245456, 1.407151782502862),
    "split": (148.66038768648227, 0.6279152509585141, 0.03830817769852892, 1.431952088508713),
    "aware": (149.873973497803, 0.6786727686714882, 0.03830539920503813, 1.4063675325815779),
}


@pytest.mark.parametrize("mode", GOLDEN)
def test_known_runs_give_their_known_results(mode: str) -> None:
    """A change that moves these changes the model: docs/reproduction.md has to be made anew."""
    result = simulate(
        config(
            mode,
            Agents(workload="48k", count=40, trajectories=20, max_turns=6),
            decode=2,
            hardware=Hardware(gpus_per_node=2, snic_bytes_per_s=1e9),
        )
    )
    found = (result.jct_s, result.ttft_s.mean, result.tpot_s.mean, result.snic_balance)
    assert found == pytest.approx(GOLDEN[mode], rel=1e-9)


SLOW_STORAGE = Hardware(
    gpus_per_node=2, snic_bytes_per_s=1e9, decode_utilisation=1.0, step_overhead_s=1e-4
)
BUSY = Agents(workload="32k", count=60, trajectories=30, max_turns=12)


def jct(mode: str, prefill: int, decode: int) -> float:
    what = config(mode, BUSY, prefill=prefill, decode=decode, hardware=SLOW_STORAGE)
    return simulate(what).jct_s


def test_where_storage_binds_completion_follows_the_usable_storage_nics() -> None:
    assert jct("dualpath", 1, 1) == pytest.approx(jct("basic", 2, 1), rel=0.12)
    assert jct("dualpath", 2, 1) == pytest.approx(jct("dualpath", 1, 2), rel=0.12)
    assert jct("basic", 1, 1) == pytest.approx(jct("basic", 1, 2), rel=0.05)


def test_modes_are_ordered_as_the_paper_has_them() -> None:
    seconds = [jct(mode, 1, 1) for mode in ("oracle", "dualpath", "basic")]
    assert seconds == sorted(seconds)
    assert seconds[2] / seconds[1] > 1.5
    assert jct("split", 1, 1) <= jct("dualpath", 1, 1) * 1.02


def test_split_loads_a_lone_request_in_half_the_time() -> None:
    agents = Agents(workload="64k", count=1, trajectories=1, max_turns=8)
    ttft = {}
    for mode in ("pe", "de", "split"):
        cluster, _ = run_cluster(config(mode, agents, hardware=Hardware(snic_bytes_per_s=10e9)))
        loaded = [s for s in cluster.recorder.stages if s.hit]
        ttft[mode] = sum(s.first_token - s.submitted for s in loaded)
    assert min(ttft["pe"], ttft["de"]) / ttft["split"] > 1.3


def test_think_times_and_traces(tmp_path: Path) -> None:
    turns = [
        {"t": 0, "in": 260, "out": 3, "think": 0, "h": [[1, 4]]},
        {"t": 40, "in": 330, "out": 2, "think": 30, "k": 4, "h": [[5, 1]]},
    ]
    file = tmp_path / "t.jsonl"
    header = {"schema": "kvt-sessions-v1", "block_size": 64}
    file.write_text("\n".join(json.dumps(x) for x in (header, {"id": "a", "turns": turns})) + "\n")
    agents = Agents(workload=str(file), count=1)
    found = scripts(agents, 64)
    assert (found[0].hit, found[0].new) == ([0, 256], [260, 74])
    assert found[0].think == [0.0, 0.0]
    waits = scripts(msgspec.structs.replace(agents, think_times=True), 64)
    assert waits[0].think[1] == 30.0
    slow = simulate(config("pe", msgspec.structs.replace(agents, think_times=True))).jct_s
    assert slow > simulate(config("pe", agents)).jct_s + 29


def test_arrivals_are_poisson_and_end_in_time() -> None:
    times = arrivals(Agents(rate=5.0, seconds=400.0))
    assert times == sorted(times)
    assert times[-1] < 400
    assert len(times) == pytest.approx(2000, rel=0.1)
    assert arrivals(Agents(count=3)) == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt-9"},
        {"mode": "fast"},
        {"prefill": 0},
        {"model": "deepseek-v3.2", "decode": 2},
        {"model": "deepseek-v3.2", "prefill": 2},
        {"block_tokens": 0},
        {"hardware": Hardware(snic_bytes_per_s=0)},
        {"agents": Agents(workload="/nowhere")},
        {"agents": Agents(count=0)},
        {"agents": Agents(rate=-1)},
    ],
)
def test_impossible_configurations_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        SimConfig(**changes)


def test_turns_before_the_warm_up_are_not_measured() -> None:
    """Agents that all begin at once fill the first seconds; the cluster's run stays the same."""
    what = config("basic", Agents(workload="32k", count=24, trajectories=12))
    whole, late = simulate(what), simulate(what, since=20.0)
    assert late.jct_s == whole.jct_s
    assert late.snic_utilisation == whole.snic_utilisation
    assert 0 < late.turns < whole.turns
    early = simulate(what, since=1e-6)
    assert early.turns == whole.turns - 24, "all first turns come at 0"
    with pytest.raises(InvalidArgument, match="to be measured"):
        simulate(what, since=whole.jct_s + 1)


def test_a_run_that_ends_before_its_first_turn_says_so() -> None:
    with pytest.raises(InvalidArgument, match="before the first turn"):
        simulate(config(), until=1e-6)


def test_the_example_is_a_configuration() -> None:
    file = Path(__file__).parents[2] / "examples" / "simulate.toml"
    if not file.exists():
        pytest.skip("the tests run apart from the sources")
    found = read_config(file)
    assert (found.prefill, found.decode, found.agents.count) == (2, 4, 256)
    assert found.hardware == Hardware(), "the example shows the defaults"

"""Meters against an independent model of RFC 2698, and in the packet path with an injected clock."""

from __future__ import annotations

from fractions import Fraction

from finsy.proto import p4i
from hypothesis import given
from hypothesis import strategies as st

from softswitch.codegen.program import Program, load
from softswitch.program.meters import GREEN, RED, YELLOW, MeterCell, MeterRates
from softswitch.program.state import Entry
from softswitch.program.trace import Trace
from tests.softswitch.support.scenarios import CHECKMATE, CPU_PORT, STUB_IP, files, number, segment

STEP = 1_000_000


def model(rates: MeterRates, packets: list[tuple[int, int]]) -> list[int]:
    """Return the colors of packets (amount, nanoseconds): RFC 2698, section 3, in fractions."""
    colors = []
    peak, committed, before = Fraction(rates.pburst), Fraction(rates.cburst), packets[0][1]
    for amount, now in packets:
        seconds = Fraction(now - before, 10**9)
        before = now
        peak = min(Fraction(rates.pburst), peak + rates.pir * seconds)
        committed = min(Fraction(rates.cburst), committed + rates.cir * seconds)
        if peak - amount < 0:
            colors.append(RED)
        elif committed - amount < 0:
            colors.append(YELLOW)
            peak -= amount
        else:
            colors.append(GREEN)
            peak -= amount
            committed -= amount
    return colors


rates = st.builds(
    lambda low, extra, cburst, pburst: MeterRates(low, cburst, low + extra, pburst),
    st.integers(0, 2000),
    st.integers(0, 2000),
    st.integers(0, 5),
    st.integers(0, 5),
)
arrivals = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3 * STEP)), min_size=1, max_size=60)


@given(rates, arrivals)
def test_colors_are_those_of_rfc_2698(given_rates: MeterRates, gaps: list[tuple[int, int]]) -> None:
    packets, now = [], 10**15
    for amount, gap in gaps:
        now += gap
        packets.append((amount, now))
    cell = MeterCell(given_rates)
    assert [cell.color(*packet) for packet in packets] == model(given_rates, packets)


def metered() -> tuple[Program, list[int]]:
    """Return a program with a stub and a client at port 1, and its clock."""
    clock = [10**12]
    program = load(*files(CHECKMATE), lambda: clock[0])
    actions = {a.preamble.name: a.preamble.id for a in program.p4info.actions}
    tables = {table.name: table for table in program.state.tables.values()}
    tables["stub"].insert(Entry((number(STUB_IP),), actions["punt_segment"], ()))
    client = Entry((1, number("10.0.0.1")), actions["meter_client"], ())
    client.meter = MeterCell(MeterRates(1000, 2, 1000, 2))
    tables["clients"].insert(client)
    return program, clock


def punted(program: Program, port: int, source: str = "10.0.0.1", count: int = 1) -> int:
    """Return how many of some SYNs reach the controller."""
    syn = segment(source=source, destination=STUB_IP, flags="S", tos=0, payload=b"")
    ways = [output.port for _ in range(count) for output in program.process(port, syn)]
    assert set(ways) <= {CPU_PORT}
    return len(ways)


def test_a_client_has_its_own_rate_and_unconfigured_strangers_none() -> None:
    program, clock = metered()
    assert punted(program, 1, count=5) == 2
    clock[0] += STEP
    assert punted(program, 1, count=5) == 1
    assert punted(program, 2, count=50) == 50
    cells = {c.preamble.name: program.state.counters[c.preamble.id] for c in program.p4info.counters}
    assert [cell.packets for cell in cells["limited"]] == [0, 7]


def test_strangers_share_the_rate_of_their_port() -> None:
    program, clock = metered()
    (meter,) = program.state.meters.values()
    meter[1] = MeterCell(MeterRates(1000, 3, 1000, 3))
    assert punted(program, 1, "10.0.0.7", 2) + punted(program, 1, "10.0.0.8", 5) == 3
    assert punted(program, 2, "10.0.0.7", 9) == 9
    assert punted(program, 1, count=2) == 2  # the client's own rate is untouched
    clock[0] += 2 * STEP
    assert punted(program, 1, "10.0.0.9", 5) == 2


def test_the_trace_names_the_color() -> None:
    program, _ = metered()
    syn = segment(destination=STUB_IP, flags="S", tos=0, payload=b"")
    for color in (0, 0, 2):
        trace = Trace(program.notations)
        program.process(1, syn, trace)
        assert f"  meter client_rate: color {color}" in trace.text().splitlines()


def test_a_packet_without_a_meter_costs_no_reading_of_the_clock() -> None:
    reads = []

    def clock() -> int:
        reads.append(1)
        return 0

    program = load(*files(CHECKMATE), clock)
    program.process(1, segment(tos=0))
    assert not reads


def test_another_unit_in_the_p4info_is_refused() -> None:
    config, p4info = files(CHECKMATE)
    p4info.meters[0].spec.unit = p4i.MeterSpec.BYTES
    try:
        load(config, p4info)
    except ValueError as error:
        assert "meter stranger_rate has another unit or table in the P4Info" in str(error)
    else:
        raise AssertionError("meters of different units were linked")

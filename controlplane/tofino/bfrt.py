"""The settings of a Tofino that P4Runtime lacks, as one bfrt_python script. Pure: text from a plan.

Tables and fields are those of the SDE's schemas (`bf_rt_port_tf1.json`, `bf_rt_tm_tf1.json`,
`bf_rt_pre_tf1.json` and `bf_rt_dev_tf1.json` in github.com/p4lang/open-p4studio, and tf2's), called by
the methods that `bfrtcli.py` there makes of them: `$DEV_PORT` is `DEV_PORT`, a table's entry with an action A
is `entry_with_A`, and `push` adds a missing entry and modifies an existing one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from checkmate.job.schema import Switch
from checkmate.job.tofino import chips
from checkmate.job.tofino.ports import PortSettings, port_settings
from controlplane.tofino.pfc import ETHERNET, PfcPlan

_FEC = MappingProxyType(
    {"none": "BF_FEC_TYP_NONE", "firecode": "BF_FEC_TYP_FIRECODE", "rs": "BF_FEC_TYP_REED_SOLOMON"}
)
LOSSY_ICOS = 7
"""The internal class of the PFC priorities that are not used here."""


def script(switch: Switch, peers: dict[int, tuple[str, ...]], plan: PfcPlan | None) -> str:
    """Return the script for one switch.

    Args:
        switch: The switch, of a Tofino target.
        peers: The names of the peers of each used port.
        plan: Buffer and thresholds; `None` for a switch whose jobs need no lossless delivery.
    """
    ports = [port_settings(switch, number) for number in sorted(peers)]
    chip = {"tofino": "tf1", "tofino2": "tf2"}[switch.target]
    return "\n".join(
        [
            *_head(switch, plan),
            *_ports(ports, peers),
            *_replication(),
            *(() if plan is None else _buffer(plan, chip)),
            *(() if plan is None else _watchdog(plan, chip)),
        ]
    )


def _head(switch: Switch, plan: PfcPlan | None) -> Iterable[str]:
    settings = "ports, replication" + ("" if plan is None else ", PFC")
    yield f"""\
# Settings that P4Runtime lacks, for {switch.name} ({switch.target}): {settings}.
# Made by `checkmate plan --bfrt`. On the switch, once its program is loaded:
#     $SDE/run_bfshell.sh -b $PWD/{switch.name}.py
# Running it again changes nothing. Existing ports keep their speed and FEC, and are enabled.

CPU_PORT = {switch.packet_port}  # the port that the program is compiled for
FRAME = {switch.mtu + ETHERNET}  # the longest, in bytes
"""
    if plan is None:
        yield """\
# No priority is paused: ranks send lost copies again (lossless: false). Buffers, queues and a watchdog of an
# earlier script stay as they are until the program is loaded again, which initialises the chip.
PFC = 0
"""
        return
    yield f"""\
PRIORITY = {plan.priority}  # of all training traffic (IEEE 802.1Q)
PFC = 1 << PRIORITY
THRESHOLD = {plan.threshold}  # cells of a port's frames above which its peer is paused
HYSTERESIS = {plan.hysteresis}  # cells below the threshold at which the peer may continue
"""


def _row(*values: object) -> str:
    return "    (" + ", ".join(json.dumps(value) for value in values) + "),"


def _ports(ports: Sequence[PortSettings], peers: dict[int, tuple[str, ...]]) -> Iterable[str]:
    yield "# Every port in use: device port, name, peers, speed, FEC."
    yield "PORTS = ["
    for port in ports:
        leads_to = ", ".join(peers[port.device_port])
        yield _row(port.device_port, port.name, leads_to, f"BF_SPEED_{port.speed}", _FEC[port.fec])
    yield "]"
    yield """\
for device_port, name, leads_to, speed, fec in PORTS:
    if bfrt.port.port.get(DEV_PORT=device_port, print_ents=False) == -1:
        bfrt.port.port.add(DEV_PORT=device_port, SPEED=speed, FEC=fec)
    bfrt.port.port.mod(
        DEV_PORT=device_port,
        PORT_ENABLE=True,
        TX_MTU=FRAME,
        RX_MTU=FRAME,
        TX_PFC_EN_MAP=PFC,
        RX_PFC_EN_MAP=PFC,
    )
    there = bfrt.port.port.get(DEV_PORT=device_port, print_ents=False).data[b"$SPEED"]
    if there != speed:
        print("port", name, "keeps its speed,", there, "instead of", speed)
"""


def _replication() -> Iterable[str]:
    yield """\
# Replication: the program leaves both exclusion ids 0, and replication id 0 is the training copy, so id 0
# must prune nothing. Frames reach the controller as unicast: no mirror session, no copy-to-CPU.
bfrt.pre.prune.entry(MULTICAST_L2_XID=0, DEV_PORT=[]).push()
"""


def _buffer(plan: PfcPlan, chip: str) -> Iterable[str]:
    yield f"""\
# The buffer, in cells. The program sets neither iCoS nor queue: all frames have iCoS 0, queue 0.
TM = bfrt.{chip}.tm
TM.pool.cfg.mod(pool="IG_APP_POOL_1", size_cells={plan.ingress_pool})
TM.pool.cfg.mod(pool="IG_SKID_POOL", size_cells={plan.skid_pool})
TM.pool.cfg.mod(pool="EG_APP_POOL_1", size_cells={plan.egress_pool})
TM.pool.app_pfc.mod(pool="IG_APP_POOL_1", cos=0, pfc_limit_cells={plan.ingress_pool})

# Ports at which training traffic arrives: device port, pipe, PPG, headroom in cells.
SENDERS = ["""
    ppgs = dict.fromkeys(range(chips.PIPES), 0)
    for sender in plan.senders:
        pipe = chips.pipe_of(sender.port.device_port)
        ppgs[pipe] += 1
        yield _row(sender.port.device_port, pipe, ppgs[pipe], sender.headroom.cells)
    yield "]"
    yield """\
for device_port, pipe, ppg, headroom in SENDERS:
    TM.port.buffer.mod(dev_port=device_port, skid_limit_cells=headroom)
    TM.ppg.cfg.entry_with_dev_port(
        ppg_id=ppg,
        dev_port=device_port,
        icos_0=True,
        guaranteed_cells=0,
        hysteresis_cells=HYSTERESIS,
        pool_id="IG_APP_POOL_1",
        pool_max_cells=THRESHOLD,
        dynamic_baf="DISABLE",
        pfc_enable=True,
        pfc_skid_max_cells=headroom,
    ).push(pipe=pipe)
"""
    yield "# Queue 0 of ports where training traffic or copies leave: port, pipe, cells, 1 if to shadow."
    yield "QUEUES = ["
    for queue in plan.queues:
        number = queue.port.device_port
        yield _row(number, chips.pipe_of(number), queue.cells, int(queue.shadow))
    yield "]"
    yield f"COS_TO_ICOS = [{LOSSY_ICOS}] * 8"
    yield """\
COS_TO_ICOS[PRIORITY] = 0
for device_port, *_ in PORTS:  # received PFC is always honoured: mode_rx is read-only
    TM.port.flowcontrol.mod(dev_port=device_port, mode_tx="PFC", cos_to_icos=COS_TO_ICOS)
PLACES = {}
for device_port, pipe, cells, shadow in QUEUES:
    place = TM.port.cfg.get(dev_port=device_port, print_ents=False).data
    queue = place[b"egress_qid_queues"][place[b"ingress_qid_map"][0]]
    PLACES[device_port] = (pipe, place[b"pg_id"], queue)
    TM.queue.cfg.mod(pg_id=place[b"pg_id"], pg_queue=queue, pfc_cos=PRIORITY, pipe=pipe)
    TM.queue.buffer.mod_with_shared_pool(
        pg_id=place[b"pg_id"],
        pg_queue=queue,
        guaranteed_cells=0,
        hysteresis_cells=HYSTERESIS,
        pool_id="EG_APP_POOL_1",
        pool_max_cells=cells,
        dynamic_baf="DISABLE",
        pipe=pipe,
    )
"""


def _watchdog(plan: PfcPlan, chip: str) -> Iterable[str]:
    yield f"""\
WATCHDOG = {plan.watchdog / 1000:g}  # seconds for which a shadow node may pause without taking a frame
RESTORE = {plan.restore / 1000:g}  # seconds until it may pause again


def watchdog(rounds=None, TM=TM, PORT=bfrt.port, QUEUES=QUEUES, PLACES=PLACES, BIT=1 << PRIORITY,
             limit=WATCHDOG, restore=RESTORE):
    \"\"\"Stop honouring the PFC of a shadow node that holds up its queue for longer than `limit` seconds.

    Its copies then leave the switch and are lost at its NIC; training continues. Its own NIC should have
    stopped pausing by then (`pfc-prevention-tout`). Runs until interrupted, or for `rounds` rounds.
    \"\"\"
    from time import monotonic, sleep

    since, sent, deaf = {{}}, {{}}, {{}}
    while rounds is None or rounds > 0:
        for device_port, pipe, cells, shadow in QUEUES:
            if not shadow:
                continue
            now = monotonic()
            where, group, queue = PLACES[device_port]
            if device_port in deaf:
                if now - deaf[device_port] >= restore:
                    PORT.port.mod(DEV_PORT=device_port, RX_PFC_EN_MAP=BIT)
                    del deaf[device_port]
                continue
            waiting = TM.counter.queue.get(
                pg_id=group, pg_queue=queue, pipe=where, from_hw=True, print_ents=False
            )
            stat = PORT.port_stat.get(DEV_PORT=device_port, from_hw=True, print_ents=False)
            count = stat.data[b"$FramesTransmittedAll"]
            if not waiting.data[b"usage_cells"] or count != sent.get(device_port):
                since[device_port], sent[device_port] = now, count
            elif now - since[device_port] >= limit:
                PORT.port.mod(DEV_PORT=device_port, RX_PFC_EN_MAP=0)
                deaf[device_port] = now
                print("port", device_port, "is stuck: its PFC is ignored for", restore, "seconds")
        rounds = None if rounds is None else rounds - 1
        sleep(limit / 10)


print("Ports, replication and PFC are set on {chip}; PCIe's CPU port is",
      bfrt.{chip}.dev.device_configuration.get_default(print_ent=False).data[b"pcie_cpu_port"],
      "and the program's is", CPU_PORT)
"""

"""Updates of multicast groups (P4Runtime specification, section 9.5)."""

from __future__ import annotations

from functools import partial

from finsy.proto import p4r

from softswitch.p4runtime.fieldcodecs import invalid, parse, to_bytes
from softswitch.p4runtime.pipeline import Pipeline, Undo
from softswitch.program.state import GroupReplica, StatusError

GROUP_MAX = 0xFFFF
INSTANCE_MAX = 0xFFFF
PORT_BITS = 32


def write_group(pipeline: Pipeline, update: p4r.Update, undo: Undo) -> None:
    """Apply an update of a multicast group."""
    message = update.entity.packet_replication_engine_entry
    if message.WhichOneof("type") != "multicast_group_entry":
        raise StatusError("UNIMPLEMENTED", f"{message.WhichOneof('type')} is not supported by this target")
    number = message.multicast_group_entry.multicast_group_id
    if not 0 < number <= GROUP_MAX:
        raise invalid(f"multicast group {number}: it must be 1 to {GROUP_MAX}")
    groups, programmed = pipeline.groups, pipeline.program.state.groups
    if update.type == p4r.Update.INSERT and number in groups:
        raise StatusError("ALREADY_EXISTS", f"multicast group {number} already exists")
    if update.type != p4r.Update.INSERT and number not in groups:
        raise StatusError("NOT_FOUND", f"multicast group {number} does not exist")
    if update.type == p4r.Update.INSERT:
        undo += [partial(groups.pop, number, None), partial(programmed.pop, number, None)]
    else:
        undo.append(partial(groups.__setitem__, number, groups[number]))
        undo.append(partial(programmed.__setitem__, number, programmed[number]))
    if update.type == p4r.Update.DELETE:
        del groups[number], programmed[number]
    else:
        kept = p4r.MulticastGroupEntry()
        kept.CopyFrom(message.multicast_group_entry)
        groups[number], programmed[number] = kept, _replicas(kept)


def _replicas(entry: p4r.MulticastGroupEntry) -> tuple[GroupReplica, ...]:
    """Return a group's copies; give the entry, for later reads, ports as the shortest byte strings."""
    group = entry.multicast_group_id
    replicas = []
    seen = set()
    for message in entry.replicas:
        if message.backup_replicas:
            raise StatusError("UNIMPLEMENTED", f"multicast group {group}: no backup replicas on this target")
        port, instance = message.egress_port, message.instance
        if message.WhichOneof("port_kind") == "port":
            port = parse(message.port, PORT_BITS, "a replica's port")
            message.port = to_bytes(port)
        if instance > INSTANCE_MAX:
            raise invalid(f"multicast group {group}: instance {instance} is above {INSTANCE_MAX}")
        if (port, instance) in seen:
            raise invalid(f"multicast group {group}: port {port}, instance {instance} comes twice")
        seen.add((port, instance))
        replicas.append(GroupReplica(port, instance))
    return tuple(replicas)

"""Updates of multicast groups (P4Runtime specification, section 9.5)."""

from __future__ import annotations

from collections.abc import Callable

from finsy.proto import p4r

from softswitch.p4runtime.bytestrings import parse, to_bytes
from softswitch.p4runtime.fieldcodecs import invalid
from softswitch.p4runtime.pipeline import Pipeline
from softswitch.program.state import GroupReplica, TableError

GROUP_MAX = 0xFFFF
INSTANCE_MAX = 0xFFFF
PORT_BITS = 32


def write_group(pipeline: Pipeline, update: p4r.Update) -> Callable[[], None]:
    """Apply an update of a multicast group and return a function that undoes it."""
    message = update.entity.packet_replication_engine_entry
    if message.WhichOneof("type") != "multicast_group_entry":
        raise TableError("UNIMPLEMENTED", f"{message.WhichOneof('type')} is not supported by this target")
    entry = message.multicast_group_entry
    number = entry.multicast_group_id
    if not 0 < number <= GROUP_MAX:
        raise invalid(f"multicast group {number}: it must be 1 to {GROUP_MAX}")
    groups, programmed = pipeline.groups, pipeline.program.state.groups
    old, old_replicas = groups.get(number), programmed.get(number)
    if update.type == p4r.Update.INSERT and old is not None:
        raise TableError("ALREADY_EXISTS", f"multicast group {number} already exists")
    if update.type != p4r.Update.INSERT and old is None:
        raise TableError("NOT_FOUND", f"multicast group {number} does not exist")
    if update.type == p4r.Update.DELETE:
        del groups[number], programmed[number]
    else:
        replicas = _replicas(entry)
        groups[number], programmed[number] = canonical(entry), replicas

    def back() -> None:
        groups.pop(number, None)
        programmed.pop(number, None)
        if old is not None and old_replicas is not None:
            groups[number], programmed[number] = old, old_replicas

    return back


def _port(replica: p4r.Replica) -> int:
    if replica.WhichOneof("port_kind") != "port":
        return replica.egress_port
    try:
        return parse(replica.port, PORT_BITS, "a replica's port")
    except ValueError as error:
        raise invalid(str(error)) from None


def _replicas(entry: p4r.MulticastGroupEntry) -> tuple[GroupReplica, ...]:
    group = entry.multicast_group_id
    replicas = []
    seen = set()
    for message in entry.replicas:
        if message.backup_replicas:
            raise TableError("UNIMPLEMENTED", f"multicast group {group}: no backup replicas on this target")
        port, instance = _port(message), message.instance
        if instance > INSTANCE_MAX:
            raise invalid(f"multicast group {group}: instance {instance} is above {INSTANCE_MAX}")
        if (port, instance) in seen:
            raise invalid(f"multicast group {group}: port {port}, instance {instance} comes twice")
        seen.add((port, instance))
        replicas.append(GroupReplica(port, instance))
    return tuple(replicas)


def canonical(entry: p4r.MulticastGroupEntry) -> p4r.MulticastGroupEntry:
    """Return a copy for later reads, with ports as the shortest byte strings."""
    copy = p4r.MulticastGroupEntry()
    copy.CopyFrom(entry)
    for replica in copy.replicas:
        if replica.WhichOneof("port_kind") == "port":
            replica.port = to_bytes(int.from_bytes(replica.port))
    return copy

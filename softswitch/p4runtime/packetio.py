"""Packet I/O: PacketIn and PacketOut metadata to and from the headers that the program sees.

P4Runtime specification, sections "ControllerPacketMetadata" and "Packet I/O": the metadata's values, in the
order of the P4Info and at their bit widths, are a header before the frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from finsy.proto import p4i, p4r

from softswitch.p4runtime.bytestrings import to_bytes


class MetadataError(ValueError):
    """A PacketOut whose metadata isn't what the P4Info says."""


@dataclass(frozen=True, slots=True)
class MetadataField:
    """A field of a controller header: P4Info id, name, width in bits."""

    id: int
    name: str
    width: int


class ControllerHeader:
    """The header named `name` ("packet_in" or "packet_out"); no fields where the P4Info has none."""

    def __init__(self, p4info: p4i.P4Info, name: str) -> None:
        self.name = name
        self.fields = tuple(
            MetadataField(each.id, each.name, each.bitwidth)
            for header in p4info.controller_packet_metadata
            if header.preamble.name == name
            for each in header.metadata
        )
        self.length = (sum(each.width for each in self.fields) + 7) // 8
        """In bytes."""

    def encode(self, packet: p4r.PacketOut) -> bytes:
        """The frame that the program gets for a PacketOut; `MetadataError`."""
        values = {each.metadata_id: each.value for each in packet.metadata}
        known = {field.id for field in self.fields}
        if len(values) != len(packet.metadata):
            raise MetadataError("a metadata id comes twice")
        for number in values.keys() - known:
            raise MetadataError(f"unknown metadata id {number}; {self.name} has {sorted(known)}")
        bits = 0
        for field in self.fields:
            value = values.get(field.id, b"")
            if not value:
                raise MetadataError(f'metadata "{field.name}" (id {field.id}) is missing or empty')
            number = int.from_bytes(value)
            if number >> field.width:
                raise MetadataError(f'metadata "{field.name}" is {number:#x}: more than {field.width} bits')
            bits = bits << field.width | number
        return bits.to_bytes(self.length) + packet.payload

    def decode(self, frame: bytes) -> p4r.PacketIn:
        """The PacketIn for a frame that the program sent to the CPU port."""
        packet = p4r.PacketIn(payload=frame[self.length :])
        bits = int.from_bytes(frame[: self.length])
        left = self.length * 8
        for field in self.fields:
            left -= field.width
            value = bits >> left & (1 << field.width) - 1
            packet.metadata.add(metadata_id=field.id, value=to_bytes(value))
        return packet

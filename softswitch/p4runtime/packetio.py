"""Packet I/O: translation of PacketIn and PacketOut metadata to and from headers of the program.

P4Runtime specification, sections "ControllerPacketMetadata" and "Packet I/O": the metadata's values are a
header before the frame, in the order and with the bit widths of the P4Info.
"""

from __future__ import annotations

from dataclasses import dataclass

from finsy.proto import p4i, p4r

from softswitch.p4runtime.bytestrings import to_bytes


class MetadataError(ValueError):
    """A PacketOut whose metadata does not match the P4Info."""


@dataclass(frozen=True, slots=True)
class MetadataField:
    """A field of a controller header: P4Info id, name, width in bits."""

    id: int
    name: str
    width: int


class ControllerHeader:
    """The header named `name` ("packet_in" or "packet_out"), without fields if the P4Info has none."""

    def __init__(self, p4info: p4i.P4Info, name: str) -> None:
        self.name = name
        self.fields = tuple(
            MetadataField(each.id, each.name, each.bitwidth)
            for header in p4info.controller_packet_metadata
            if header.preamble.name == name
            for each in header.metadata
        )
        self.length = (sum(each.width for each in self.fields) + 7) // 8
        """Length in bytes."""

    def encode(self, packet: p4r.PacketOut) -> bytes:
        """Return the program's frame for a PacketOut; raise `MetadataError` for wrong metadata."""
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
        """Return the PacketIn for a frame from the program to the CPU port."""
        packet = p4r.PacketIn(payload=frame[self.length :])
        bits = int.from_bytes(frame[: self.length])
        left = self.length * 8
        for field in self.fields:
            left -= field.width
            value = bits >> left & (1 << field.width) - 1
            packet.metadata.add(metadata_id=field.id, value=to_bytes(value))
        return packet

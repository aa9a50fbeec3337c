"""Packet I/O: translation of PacketIn and PacketOut metadata to and from headers of the program.

P4Runtime specification, sections "ControllerPacketMetadata" and "Packet I/O": the metadata's values are a
header before the frame, in the order and with the bit widths of the P4Info.
"""

from __future__ import annotations

from finsy.proto import p4i, p4r

from softswitch.p4runtime.fieldcodecs import format_number, invalid, to_bytes

MAX_WIDTH = 2048


class ControllerHeader:
    """The header named `name` ("packet_in" or "packet_out"), without fields if the P4Info has none.

    Raise `ValueError` if a field's width is impossible.
    """

    def __init__(self, p4info: p4i.P4Info, name: str) -> None:
        self.name = name
        self.fields = tuple(
            field
            for header in p4info.controller_packet_metadata
            if header.preamble.name == name
            for field in header.metadata
        )
        for field in self.fields:
            if not 0 < field.bitwidth <= MAX_WIDTH:
                raise ValueError(f"{name}: metadata {field.name[:60]} has {field.bitwidth} bits")
        self.length = (sum(field.bitwidth for field in self.fields) + 7) // 8
        """Length in bytes."""

    def encode(self, packet: p4r.PacketOut) -> bytes:
        """Return the program's frame for a PacketOut; raise `StatusError` for wrong metadata."""
        values = {metadata.metadata_id: metadata.value for metadata in packet.metadata}
        field_ids = {field.id for field in self.fields}
        if len(values) != len(packet.metadata):
            raise invalid("a metadata id comes twice")
        for number in values.keys() - field_ids:
            raise invalid(f"unknown metadata id {number}; {self.name} has {sorted(field_ids)}")
        bits = 0
        for field in self.fields:
            value = values.get(field.id, b"")
            if not value:
                raise invalid(f'metadata "{field.name}" (id {field.id}) is missing or empty')
            number = int.from_bytes(value)
            if number >> field.bitwidth:
                raise invalid(
                    f'metadata "{field.name}" is {format_number(number)}: more than {field.bitwidth} bits'
                )
            bits = bits << field.bitwidth | number
        return bits.to_bytes(self.length) + packet.payload

    def decode(self, frame: bytes) -> p4r.PacketIn:
        """Return the PacketIn for a frame from the program to the CPU port."""
        packet = p4r.PacketIn(payload=frame[self.length :])
        bits = int.from_bytes(frame[: self.length])
        shift = self.length * 8
        for field in self.fields:
            shift -= field.bitwidth
            value = bits >> shift & (1 << field.bitwidth) - 1
            packet.metadata.add(metadata_id=field.id, value=to_bytes(value))
        return packet

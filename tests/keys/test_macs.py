"""Message authentication codes."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from checkmate.keys import macs
from checkmate.keys.errors import Malformed
from checkmate.keys.macs import (
    GRADIENTS,
    MAC_BYTES,
    ConnectionProof,
    ConnectionSide,
    PartMacs,
    hello_mac,
    is_hello_authentic,
)
from checkmate.keys.secret_files import new_secret, parse_secret

KEY = bytes(range(32))
PROOF = ConnectionProof(KEY, b"greeting", bytes(16), bytes([1]) * 16)

keys = st.binary(min_size=32, max_size=32)
nonces = st.binary(min_size=16, max_size=16)


def test_the_codes_on_the_wire_are_these() -> None:
    assert hello_mac(KEY, b"hello").hex() == "519f9137791f4b622edb57427ad61e27"
    assert PROOF.mac(ConnectionSide.CONNECTS).hex() == "2df6ff6904bcdb58c49f342d7e2fe696"
    assert PROOF.mac(ConnectionSide.ACCEPTS).hex() == "bb3adaa49e196bc3b8f2b651701a54c9"


@given(keys, st.binary(), st.integers(0), st.integers(0, 7))
def test_a_changed_hello_is_not_authentic(key: bytes, message: bytes, place: int, bit: int) -> None:
    mac = hello_mac(key, message)
    assert len(mac) == 16
    assert is_hello_authentic(key, message, mac)

    def with_changed_bit(data: bytes) -> bytes:
        copy = bytearray(data or b"\0")
        copy[place % len(copy)] ^= 1 << bit
        return bytes(copy)

    assert not is_hello_authentic(with_changed_bit(key), message, mac)
    assert not is_hello_authentic(key, with_changed_bit(message), mac)
    assert not is_hello_authentic(key, message, with_changed_bit(mac))
    assert not is_hello_authentic(key, message, mac[:15])
    assert not is_hello_authentic(key, message, b"")


@given(keys, st.binary(), nonces, nonces, st.data())
def test_a_ring_proof_is_for_one_connection_and_direction(
    key: bytes, greeting: bytes, first_nonce: bytes, second_nonce: bytes, data: st.DataObject
) -> None:
    proof = ConnectionProof(key, greeting, first_nonce, second_nonce)
    for side in ConnectionSide:
        assert proof.is_authentic(side, proof.mac(side))
        assert not proof.is_authentic(ConnectionSide(1 - side), proof.mac(side))
        changes: dict[str, st.SearchStrategy[bytes]] = {
            "key": keys,
            "greeting": st.binary(),
            "connects_nonce": nonces,
            "accepts_nonce": nonces,
        }
        for name, values in changes.items():
            changed_proof = replace(proof, **{name: data.draw(values)})
            assert changed_proof.is_authentic(side, proof.mac(side)) == (changed_proof == proof)


def test_a_code_for_one_purpose_is_none_for_another() -> None:
    message = bytes([ConnectionSide.CONNECTS]) + PROOF.connects_nonce + PROOF.accepts_nonce + PROOF.greeting
    assert hello_mac(KEY, message) != PROOF.mac(ConnectionSide.CONNECTS)


@pytest.mark.parametrize("length", [0, 15, 17])
def test_nonces_have_one_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"nonces have 16 bytes each, not {length} and 16"):
        replace(PROOF, connects_nonce=bytes(length))
    assert len({macs.new_nonce() for _ in range(100)}) == 100
    assert len(macs.new_nonce()) == 16


@pytest.mark.parametrize("length", [0, 16, 64])
def test_keys_have_one_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"a key has 32 bytes, not {length}"):
        hello_mac(bytes(length), b"")
    assert "key" not in repr(PROOF)


def test_a_secret_is_read_as_it_was_written() -> None:
    content = new_secret()
    assert content != new_secret()
    assert len(parse_secret(content)) == 32
    assert parse_secret(content.upper().rstrip()) == parse_secret(content)


@given(st.binary())
def test_anything_else_is_not_a_secret(content: bytes) -> None:
    with pytest.raises(Malformed, match="is not 64 hexadecimal digits"):
        parse_secret(content)


def test_a_parts_mac_is_of_its_bytes_its_place_and_its_connection() -> None:
    def mac(parts: list[bytes], nonce: bytes = bytes(16), key: bytes = bytes(32)) -> bytes:
        """Return the MAC of the last of a connection's messages, each of which comes in two pieces."""
        macs = PartMacs(ConnectionProof(key, b"greeting", nonce, bytes(16), GRADIENTS))
        for part in parts:
            part_mac = macs.begin(b"header")
            part_mac.update(part[:3])
            part_mac.update(memoryview(part)[3:])
        return part_mac.end()

    assert mac([b"a part"]) == mac([b"a part"])
    assert len(mac([b"a part"])) == MAC_BYTES
    different = [
        mac([b"a pard"]),
        mac([b"a part", b"a part"]),
        mac([b"a part"], nonce=b"n" * 16),
        mac([b"a part"], key=b"k" * 32),
    ]
    assert len({mac([b"a part"]), *different}) == 5
    whole = blake2b(
        bytes(32) + b"greeting", digest_size=16, key=bytes(32), person=b"checkmate codes"
    ).digest()
    cipher = AESGCM(whole).encrypt(bytes(12), b"", b"headera part")
    assert mac([b"a part"]) == cipher, "as any implementation of GCM computes it"

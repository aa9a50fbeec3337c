"""TLS handshakes with keys that were made: over sockets, and over gRPC."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from checkmate.base.waiting_calls import host_of_call
from checkmate.job.schema import Job
from checkmate.keys.callers import CallerRefused, caller_role, check_call
from checkmate.keys.contexts import (
    channel_credentials,
    client_context,
    server_context,
    server_credentials,
    uris_of_call,
)
from checkmate.keys.errors import KeysError
from checkmate.keys.folder import RoleKeys
from checkmate.keys.roles import Role
from checkmate.keys.tls_trial import uris_of_socket
from checkmate.rpc import shadow_pb2 as pb
from checkmate.rpc.shadow_pb2_grpc import ShadowStub
from tests.support.keys import NOW, role_keys, served_job

SECONDS = 10.0
LONG_AGO = NOW - dt.timedelta(days=800)

Keys = Callable[..., RoleKeys]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Return a function that returns a role's keys, by default of one authority and made now."""

    def of(role: Role, authority: str = "ours", now: dt.datetime = NOW) -> RoleKeys:
        return role_keys(served_job(), tmp_path / f"{authority}{now.year}", role, now)

    return of


def meet(
    server: ssl.SSLContext, client: ssl.SSLContext | None, name: str = "127.0.0.1", payload: bytes = b"ping"
) -> tuple[list[str], str | None]:
    """Have a client send bytes to a server. Return the client's URIs and the version of TLS.

    `client`: `None` to send without TLS. Raises the server's error, else the client's.
    """
    server_end, client_end = socket.socketpair()

    def serve() -> tuple[list[str], str | None]:
        with closing(server_end), server.wrap_socket(server_end, server_side=True) as sock:
            assert sock.recv(len(payload)) == payload
            sock.sendall(payload)
            return uris_of_socket(sock.getpeercert()), sock.version()

    def call() -> None:
        with closing(client_end):
            if client is None:
                client_end.sendall(payload)
                client_end.recv(1)
                return
            with client.wrap_socket(client_end, server_hostname=name) as sock:
                sock.sendall(payload)
                assert (
                    sock.recv(len(payload)) == payload
                )  # TLS 1.3: a refusal arrives after the client's handshake

    for sock in (server_end, client_end):
        sock.settimeout(SECONDS)
    with ThreadPoolExecutor(2) as pool:
        served, client_future = pool.submit(serve), pool.submit(call)
        greeting = served.result(SECONDS)
        client_future.result(SECONDS)
    return greeting


@pytest.mark.parametrize("role", Role)
def test_each_role_can_connect_and_is_recognised(keys: Keys, role: Role) -> None:
    uris, version = meet(server_context(keys(Role.SHADOW)), client_context(keys(role)))
    assert (uris, version) == ([f"checkmate:gpt/{role}"], "TLSv1.3")
    assert caller_role(uris, served_job()) is role


def test_a_client_of_another_authority_is_refused(keys: Keys) -> None:
    stranger = replace(keys(Role.TRAINER, "theirs"), ca=keys(Role.TRAINER).ca)  # it trusts our server
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        meet(server_context(keys(Role.SHADOW)), client_context(stranger))


def test_a_server_of_another_authority_is_refused(keys: Keys) -> None:
    with pytest.raises(ssl.SSLError, match="unknown ca"):  # what the client reports to the server
        meet(server_context(keys(Role.SHADOW, "theirs")), client_context(keys(Role.TRAINER)))


def test_an_expired_client_is_refused(keys: Keys) -> None:
    # Each side trusts the other's authority, so nothing but the time is wrong.
    old, server = keys(Role.TRAINER, now=LONG_AGO), keys(Role.SHADOW)
    with pytest.raises(ssl.SSLError, match="certificate has expired"):
        meet(server_context(replace(server, ca=old.ca)), client_context(replace(old, ca=server.ca)))


def test_an_expired_server_is_refused(keys: Keys) -> None:
    old, client = keys(Role.SHADOW, now=LONG_AGO), keys(Role.TRAINER)
    with pytest.raises(ssl.SSLError, match="certificate expired"):
        meet(server_context(replace(old, ca=client.ca)), client_context(replace(client, ca=old.ca)))


@pytest.mark.parametrize("payload", [b"neither TLS nor a greeting", bytes.fromhex("c4ec0002") + bytes(64)])
def test_a_plain_connection_is_refused(keys: Keys, payload: bytes) -> None:
    with pytest.raises(ssl.SSLError):
        meet(server_context(keys(Role.SHADOW)), None, payload=payload)


def test_a_client_without_a_certificate_is_refused(keys: Keys) -> None:
    bare = ssl.create_default_context(cadata=keys(Role.TRAINER).ca.decode())
    with pytest.raises(ssl.SSLError, match="peer did not return a certificate"):
        meet(server_context(keys(Role.SHADOW)), bare)


def test_an_older_version_of_tls_is_refused(keys: Keys) -> None:
    old = client_context(keys(Role.TRAINER))
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="unsupported protocol"):
        meet(server_context(keys(Role.SHADOW)), old)


@pytest.mark.parametrize("name", ["127.0.0.2", "localhost"])
def test_a_server_at_another_address_is_refused(keys: Keys, name: str) -> None:
    client = client_context(keys(Role.TRAINER))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        meet(server_context(keys(Role.SHADOW)), client, name)
    meet(server_context(keys(Role.SHADOW)), client, "127.0.0.1")


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.SHADOW])
def test_only_shadow_nodes_can_serve(keys: Keys, role: Role) -> None:
    client = client_context(keys(Role.TRAINER))
    client.check_hostname = False  # the key usage alone is enough
    with pytest.raises((ssl.SSLError, ConnectionError)):
        meet(server_context(keys(role)), client)


def test_names_are_checked_as_dns_names_too(tmp_path: Path) -> None:
    job = served_job("gpt", "node.example.org", "fd00::1")
    server = server_context(role_keys(job, tmp_path, Role.SHADOW))
    client = client_context(role_keys(job, tmp_path, Role.TRAINER))
    for name in ("node.example.org", "fd00::1"):
        meet(server, client, name)


def test_a_file_that_was_exchanged_meanwhile_is_named(keys: Keys) -> None:
    trainer = keys(Role.TRAINER)
    trainer.key_file.write_bytes(keys(Role.READER).key)
    with pytest.raises(KeysError, match=f"TLS refuses the keys in {trainer.folder}: .*MISMATCH"):
        client_context(trainer)


def test_one_authority_for_two_jobs_gives_neither_the_others_roles(tmp_path: Path) -> None:
    """Also if both jobs have one folder of keys: a node that trusts both authorities stands for one."""
    own_job, foreign_job = served_job("gpt"), served_job("bert")
    node, stranger = (role_keys(job, tmp_path, Role.SHADOW) for job in (own_job, foreign_job))
    server = server_context(replace(node, ca=node.ca + stranger.ca))
    for role in Role:
        client = replace(role_keys(foreign_job, tmp_path, role), ca=node.ca)
        uris, _ = meet(server, client_context(client))  # TLS itself accepts it
        with pytest.raises(CallerRefused, match=f"has the URI 'checkmate:bert/{role}', which is not"):
            caller_role(uris, own_job)
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):  # as `checkmate keys` makes them
        meet(server_context(node), client_context(replace(stranger, ca=node.ca)))


def guarded(job: Job) -> grpc.GenericRpcHandler:
    """Return some calls of a shadow node, which check their callers and answer with their role."""

    def check(rpc: str, context: grpc.ServicerContext) -> Role:
        try:
            role = caller_role(uris_of_call(context.auth_context()), job)
            check_call(rpc, role, host_of_call(context.peer()), job)
        except CallerRefused as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        return role

    def handler_of(rpc: str) -> grpc.RpcMethodHandler[bytes, pb.NodeStatus]:
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: pb.NodeStatus(trouble=[check(rpc, context)]),
            response_serializer=pb.NodeStatus.SerializeToString,
        )

    def parts(_: bytes, context: grpc.ServicerContext) -> Iterator[pb.RecordPart]:
        yield pb.RecordPart(run=check("Parts", context))

    handlers: dict[str, grpc.RpcMethodHandler[bytes, Any]] = {
        "Status": handler_of("Status"),
        "Fence": handler_of("Fence"),
        "Parts": grpc.unary_stream_rpc_method_handler(
            parts, response_serializer=pb.RecordPart.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler("checkmate.v1.Shadow", handlers)


@contextmanager
def serving(keys: RoleKeys, job: Job, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve `guarded` with TLS; yield its address."""
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((guarded(job),))
    port = server.add_secure_port(f"{host}:0", server_credentials(keys))
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def calling(address: str, credentials: grpc.ChannelCredentials | None) -> Iterator[ShadowStub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = (
        grpc.insecure_channel(address, options)
        if credentials is None
        else grpc.secure_channel(address, credentials, options)
    )
    with channel:
        yield ShadowStub(channel)


def ask_status(address: str, credentials: grpc.ChannelCredentials | None) -> str:
    """Return the caller's role, as the server sees it."""
    with calling(address, credentials) as stub:
        return stub.Status(pb.StatusRequest(), timeout=SECONDS).trouble[0]


def code_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    raised_error = error.value
    assert isinstance(raised_error, grpc.Call)
    return raised_error.code(), raised_error.details() or ""


def test_grpc_recognises_each_role_and_refuses_what_it_may_not(keys: Keys) -> None:
    with serving(keys(Role.SHADOW), served_job()) as address:
        for role in Role:
            assert ask_status(address, channel_credentials(keys(role))) == role
        with calling(address, channel_credentials(keys(Role.READER))) as stub:
            code, words = code_of(lambda: stub.Fence(pb.FenceRequest(), timeout=SECONDS))
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert words == "role reader may not call Fence, which is for trainer"
        with calling(address, channel_credentials(keys(Role.SHADOW))) as stub:
            assert next(stub.Parts(pb.PartsRequest(), timeout=SECONDS)).run == "shadow"


def test_grpc_refuses_strangers(keys: Keys) -> None:
    trainer_keys = keys(Role.TRAINER)
    stranger = replace(keys(Role.TRAINER, "theirs"), ca=trainer_keys.ca)
    bare = grpc.ssl_channel_credentials(trainer_keys.ca)
    with serving(keys(Role.SHADOW), served_job()) as address:
        for credentials in (channel_credentials(stranger), bare, None):
            assert code_of(lambda c=credentials: ask_status(address, c))[0] == grpc.StatusCode.UNAVAILABLE  # type: ignore[misc]
        assert ask_status(address, channel_credentials(trainer_keys)) == "trainer"


def test_grpc_refuses_what_has_expired(keys: Keys) -> None:
    old, shadow_keys = keys(Role.TRAINER, now=LONG_AGO), keys(Role.SHADOW)
    with serving(replace(shadow_keys, ca=old.ca), served_job()) as address:
        credentials = channel_credentials(replace(old, ca=shadow_keys.ca))
        assert code_of(lambda: ask_status(address, credentials))[0] == grpc.StatusCode.UNAVAILABLE
        current = replace(keys(Role.TRAINER, "theirs"), ca=shadow_keys.ca)
    with serving(replace(shadow_keys, ca=keys(Role.READER, "theirs").ca), served_job()) as address:
        assert ask_status(address, channel_credentials(current)) == "trainer"  # the same way, but valid


def test_grpc_checks_the_servers_name(keys: Keys) -> None:
    with serving(keys(Role.SHADOW), served_job(), "127.0.0.2") as address:
        code, words = code_of(lambda: ask_status(address, channel_credentials(keys(Role.TRAINER))))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.2" in words


def test_grpc_shows_a_caller_over_ipv6(tmp_path: Path) -> None:
    job = served_job("gpt", "::1")
    with serving(role_keys(job, tmp_path, Role.SHADOW), job, "[::1]") as address:
        credentials = channel_credentials(role_keys(job, tmp_path, Role.SHADOW))
        with calling(address, credentials) as stub:
            assert next(stub.Parts(pb.PartsRequest(), timeout=SECONDS)).run == "shadow"

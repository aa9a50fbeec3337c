"""NCCL's side of its plugin interfaces: the plugin's exported symbols, called as NCCL's threads call them."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

REMOTE_ERROR: Final = 6
_HANDLE_BYTES: Final = 128
_GROUP, _COLL, _PROXY_OP, _PROXY_STEP, _NET, _COLL_API = 1 << 0, 1 << 1, 1 << 3, 1 << 4, 1 << 7, 1 << 9
_SEND_REM_FIFO_WAIT: Final = 1
_SEND_PEER_WAIT: Final = 20

_LOGGER = ctypes.CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p)
_CALLBACKS: Final[list[object]] = []
"""Callbacks, which the plugin may call as long as it is loaded: for ever."""
_PROFILE = ctypes.CFUNCTYPE(c_int, POINTER(c_void_p), c_int, c_void_p, c_int64, c_void_p)


class _Coll(ctypes.Structure):
    _fields_ = (
        ("sequence", c_uint64),
        ("function", c_char_p),
        ("send_buffer", c_void_p),
        ("receive_buffer", c_void_p),
        ("count", c_size_t),
        ("root", c_int),
        ("datatype", c_char_p),
        ("channels", c_uint8),
        ("warps", c_uint8),
        ("algorithm", c_char_p),
        ("protocol", c_char_p),
    )


class _NamedColl(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("comm_hash", c_uint64), ("coll", _Coll))


class _GroupedColl(ctypes.Structure):
    _fields_ = (("coll", _Coll), ("group", c_void_p))


class _CollApi(ctypes.Structure):
    _fields_ = (
        ("function", c_char_p),
        ("count", c_size_t),
        ("datatype", c_char_p),
        ("root", c_int),
        ("stream", c_void_p),
        ("graph_captured", ctypes.c_bool),
    )


class _ProxyOp(ctypes.Structure):
    _fields_ = (
        ("pid", c_int),
        ("channel", c_uint8),
        ("peer", c_int),
        ("steps", c_int),
        ("chunk_bytes", c_int),
        ("is_send", c_int),
    )


class _OpState(ctypes.Structure):
    _fields_ = (("transferred", c_size_t), ("steps", c_int))


class _Net(ctypes.Structure):
    _fields_ = (("plugin", c_int64), ("data", c_void_p))


class _EventDetail(ctypes.Union):
    _fields_ = (
        ("coll", _Coll),
        ("named", _NamedColl),
        ("grouped", _GroupedColl),
        ("api", _CollApi),
        ("op", _ProxyOp),
        ("step", c_int),
        ("net", _Net),
    )


class _OldEvent(ctypes.Structure):
    _fields_ = (("type", c_uint8), ("parent", c_void_p), ("rank", c_int), ("what", _EventDetail))


class _Event(ctypes.Structure):
    _fields_ = (("type", c_uint64), ("parent", c_void_p), ("rank", c_int), ("what", _EventDetail))


@dataclass(frozen=True)
class Versions:
    """Versions of the net, profiler and tuner interfaces of a release of NCCL."""

    net: int
    profiler: int
    tuner: int


RELEASES: Final = {
    "2.26": Versions(10, 3, 4),
    "2.27": Versions(10, 4, 4),
    "2.28": Versions(11, 5, 5),
    "2.29": Versions(11, 6, 5),
    "2.30": Versions(12, 6, 6),
}


class Caller:
    """One rank's NCCL, which has loaded the plugin's file at `path`."""

    def __init__(self, path: Path, versions: Versions) -> None:
        self.versions = versions
        self.library = ctypes.CDLL(str(path))
        self._net = self._functions(f"ncclNetPlugin_v{versions.net}", 22)
        self._profiler = self._functions(f"ncclProfiler_v{versions.profiler}", 6)
        self._tuner = self._functions(f"ncclTunerPlugin_v{versions.tuner}", 5)
        self._profile_callback = _PROFILE(self._profiled)
        self._log_callback = _LOGGER(lambda *_: None)
        _CALLBACKS.extend((self._profile_callback, self._log_callback))
        self._net_context = c_void_p()
        self._profiler_context = c_void_p()
        self._phandles = itertools.count(1)
        self._step_of_phandle: dict[int, int | None] = {}
        self._place_of_step: dict[int, tuple[int | None, int]] = {}
        self._earlier: int | None = None
        self.mask = 0

    def _functions(self, symbol: str, count: int) -> list[int | None]:
        """Return the pointers of a structure of functions, of which the first is its name."""
        return list((c_void_p * count).in_dll(self.library, symbol))

    def _call(self, functions: list[int | None], index: int, *arguments: Any) -> int:
        return int(ctypes.CFUNCTYPE(c_int)(functions[index] or 0)(*arguments))

    # Set-up

    def init(self, comm_hash: int, nodes: int, ranks: int, rank: int) -> int:
        """Make a communicator; return 0 if it uses the net, and an error if it goes on to the next one."""
        net, log, profile = self.versions.net, self._log_callback, self._profile_callback
        before = () if net == 10 else (byref(self._net_context), c_uint64(comm_hash), None)
        assert self._call(self._net, 1, *before, log, profile) == 0  # else NCCL disables the net for ever
        result = self.properties()
        mask = c_int()
        name, sizes = None, (nodes, ranks, rank, log)
        context, hash_ = byref(self._profiler_context), c_uint64(comm_hash)
        rest: tuple[Any, ...]
        match self.versions.profiler:
            case 3:
                rest = (byref(mask),)
            case 4:
                rest = (byref(mask), name, hash_, *sizes)
            case _:
                rest = (hash_, byref(mask), name, *sizes)
        self._call(self._profiler, 1, context, *rest)
        self.mask = mask.value
        return result

    def properties(self, device: int = 0) -> int:
        """Ask for a device's properties, which NCCL does right after init; return the result."""
        return self._call(self._net, 3, device, ctypes.create_string_buffer(512))

    def tuned(
        self, comm_hash: int, ranks: int, function: int = 4, cost: float = 5.0
    ) -> tuple[list[list[float]], int]:
        """Return the costs, by algorithm and protocol, and the channels that the tuner sets."""
        context, costs, channels = c_void_p(), (ctypes.c_float * 21)(*[cost] * 21), c_int(0)
        size = c_size_t(ranks)
        if self.versions.tuner == 4:
            self._call(self._tuner, 1, size, size, self._log_callback, byref(context))
        else:
            self._call(
                self._tuner,
                1,
                byref(context),
                c_uint64(comm_hash),
                size,
                size,
                self._log_callback,
                None,
                None,
            )
        arguments = (context, function, c_size_t(1 << 20), 1, costs, 7, 3, 0, byref(channels))
        assert self._call(self._tuner, 2, *arguments) == 0  # else NCCL fails the AllReduce
        return [list(costs[3 * i : 3 * i + 3]) for i in range(7)], channels.value

    # Connections: the order of functions in versions 10 to 12

    def listen(self) -> tuple[bytes, int]:
        """Return a handle for the other rank, and the listening object."""
        handle, comm = ctypes.create_string_buffer(_HANDLE_BYTES), c_void_p()
        assert self._call(self._net, 4, *self._context(), 0, handle, byref(comm)) == 0
        return handle.raw, comm.value or 0

    def connect(self, handle: ctypes.Array[ctypes.c_char]) -> int | None:
        """Connect to a handle, in memory that stays the same; return `None` if it is to be called again."""
        comm, device = c_void_p(), c_void_p()
        config = (None,) if self.versions.net == 10 else ()
        result = self._call(self._net, 5, *self._context(), 0, *config, handle, byref(comm), byref(device))
        assert result == 0, result
        return comm.value

    def accept(self, listening: int) -> int | None:
        """Accept a connection; return `None` if it is to be called again."""
        comm, device = c_void_p(), c_void_p()
        assert self._call(self._net, 6, c_void_p(listening), byref(comm), byref(device)) == 0
        return comm.value

    def _context(self) -> tuple[c_void_p, ...]:
        return () if self.versions.net == 10 else (self._net_context,)

    def isend(self, comm: int, data: Any, nbytes: int, step: int | None) -> tuple[int, int | None]:
        """Send; return the result and the request. `step` is the profiler's handle of the send's step.

        As in NCCL 2.26, net events of version 3 name an earlier step.
        """
        request, phandle = c_void_p(), next(self._phandles)
        self._step_of_phandle[phandle] = step
        if step is not None and self.versions.profiler > 3:
            self._call(self._profiler, 4, c_void_p(step), _SEND_PEER_WAIT, None)
        elif step is not None:
            op, number = self._place_of_step[step]
            state = _OpState(0, number + 1)
            self._call(self._profiler, 4, c_void_p(op), _SEND_REM_FIFO_WAIT, byref(state))
            self._step_of_phandle[phandle], self._earlier = self._earlier, step
        result = self._call(
            self._net, 10, c_void_p(comm), data, c_size_t(nbytes), 0, None, c_void_p(phandle), byref(request)
        )
        del self._step_of_phandle[phandle]
        return result, request.value

    def irecv(self, comm: int, data: Any, room: int) -> tuple[int, int | None]:
        """Receive; return the result and the request."""
        request, pointers, sizes = c_void_p(), (c_void_p * 1)(ctypes.addressof(data)), (c_size_t * 1)(room)
        tags, handles = (c_int * 1)(0), (c_void_p * 1)(None)
        result = self._call(
            self._net, 11, c_void_p(comm), 1, pointers, sizes, tags, handles, handles, byref(request)
        )
        return result, request.value

    def test(self, request: int) -> tuple[int, int | None]:
        """Return the result, and the size of the request if it is done."""
        is_done, size = c_int(), c_int()
        result = self._call(self._net, 13, c_void_p(request), byref(is_done), byref(size))
        return result, size.value if is_done.value else None

    def close_send(self, comm: int) -> None:
        """Close a sending connection."""
        assert self._call(self._net, 14, c_void_p(comm)) == 0

    def close_receive(self, comm: int) -> None:
        """Close a receiving connection."""
        assert self._call(self._net, 15, c_void_p(comm)) == 0

    def close_listen(self, listening: int) -> None:
        """Close a listening object."""
        assert self._call(self._net, 16, c_void_p(listening)) == 0

    # Events

    def group(self) -> int | None:
        """Begin the event of a group of collectives; return its handle."""
        return self._start(_GROUP, None, _EventDetail())

    def api(self, *, captured: bool) -> None:
        """Begin the event of a call of NCCL, which versions 5 and 6 have."""
        self._start(_COLL_API, None, _EventDetail(api=_CollApi(b"AllReduce", graph_captured=captured)))

    def coll(self, address: int, count: int, datatype: str, channels: int, **more: Any) -> int | None:
        """Begin and end a collective's event; return its handle."""
        values = {"function": b"AllReduce", "algorithm": b"RING", "protocol": b"SIMPLE", **more}
        comm_hash, group = values.pop("comm_hash", 0), values.pop("group", None)
        coll = _Coll(
            send_buffer=address, count=count, datatype=datatype.encode(), channels=channels, **values
        )
        detail = (
            _EventDetail(named=_NamedColl(None, comm_hash, coll))
            if self.versions.profiler == 3
            else _EventDetail(grouped=_GroupedColl(coll, group))
        )
        handle = self._start(_COLL, group if self.versions.profiler < 5 else None, detail)
        self._call(self._profiler, 3, c_void_p(handle))
        return handle

    def proxy_op(self, coll: int | None, channel: int, peer: int, *, is_send: bool = True) -> int | None:
        """Begin a proxy operation's event; return its handle."""
        return self._start(_PROXY_OP, coll, _EventDetail(op=_ProxyOp(0, channel, peer, 0, 0, is_send)))

    def proxy_step(self, op: int | None, step: int) -> int | None:
        """Begin a step's event; return its handle."""
        handle = self._start(_PROXY_STEP, op, _EventDetail(step=step))
        if handle is not None:
            self._place_of_step[handle] = op, step
        return handle

    def _start(self, kind: int, parent: int | None, detail: _EventDetail) -> int | None:
        event_handle = c_void_p()
        event = (_OldEvent if self.versions.profiler < 5 else _Event)(kind, parent, 0, detail)
        assert self._call(self._profiler, 2, self._profiler_context, byref(event_handle), byref(event)) == 0
        return event_handle.value

    def _profiled(self, handle: Any, kind: int, phandle: int, plugin: int, data: int) -> int:
        """Do as NCCL's callback: tell the profiler of a net event, below the step of `phandle`."""
        if kind == 0 and (step := self._step_of_phandle.get(phandle)) is not None:
            handle[0] = self._start(_NET, step, _EventDetail(net=_Net(plugin, data)))
        return 0

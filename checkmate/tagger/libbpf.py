"""Compiles the tagger's program, and loads it with libbpf 1.x through ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from checkmate.base.cache import CompilerRefused, compiled
from checkmate.base.privileges import Capability, effective, given_up
from checkmate.tagger.errors import TaggerUnavailable

SOURCE = Path(__file__).with_name("tagger.c")
HEADER = Path(__file__).with_name("tagger.h")
PACKAGES = "apt-get install clang libbpf-dev linux-libc-dev"
"""Debian's names of the packages that the compilation needs."""

_FLAGS = ("-target", "bpf", "-g", "-O2", "-Wall", "-Werror")


def object_file(cache: Path | None = None) -> Path:
    """Return the path of the compiled program. Compile it unless it is in the cache.

    The cache is `$XDG_CACHE_HOME/checkmate` by default, or `~/.cache/checkmate`, if it is this user's own.

    Raises:
        TaggerUnavailable: clang or a header is missing, or the cache can't be written.
    """
    try:
        return compiled("tagger.o", [SOURCE, HEADER], _FLAGS, _command, cache)
    except CompilerRefused as error:
        raise TaggerUnavailable(f"clang refused {SOURCE.name}: {error}", PACKAGES) from None
    except OSError as error:
        raise TaggerUnavailable(
            f"no access to its compiled program: {error}", "set XDG_CACHE_HOME to a folder you can write to"
        ) from None


def _command() -> list[str]:
    clang = shutil.which("clang")
    if clang is None:
        raise TaggerUnavailable("clang, which compiles its eBPF program, is not on PATH", PACKAGES)
    # Debian has asm/types.h in the architecture's own folder, which clang's bpf target doesn't search.
    return [clang, *_FLAGS, f"-I/usr/include/{platform.machine()}-linux-gnu", "-c", str(SOURCE)]


_LIBRARY = "libbpf.so.1"
_WARN = 0
REQUIRED = (Capability.BPF, Capability.PERFMON, Capability.NET_ADMIN)
"""Without PERFMON, the verifier refuses the program."""
_SETS = "+bpf,+perfmon,+net_admin"
REMEDY = (
    f"start the script, or torchrun, by setpriv --inh-caps={_SETS} --ambient-caps={_SETS}, "
    "which for an ordinary user must be an administrator's copy (`checkmate docs security`), or as root"
)
_CAPABILITIES_GIVEN_UP = (
    "this process gave them up after it had protected a model: without root, protect once in a process"
)
_PRINT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_POINTERS = (
    "bpf_object__open_file",
    "bpf_object__find_program_by_name",
    "bpf_program__attach_cgroup",
    "bpf_object__find_map_by_name",
)


def _load_library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY, use_errno=True)
    except OSError:
        raise TaggerUnavailable(f"{_LIBRARY} is not installed", "apt-get install libbpf1") from None
    for name in _POINTERS:
        getattr(library, name).restype = ctypes.c_void_p
    library.bpf_map__value_size.restype = ctypes.c_uint32
    return library


class BpfObject:
    """A loaded BPF object file with one cgroup program, until `close`."""

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            TaggerUnavailable: libbpf is not installed, or the kernel refuses the program.
        """
        self._library = _load_library()
        self._warnings: list[str] = []
        self._quiet = _PRINT(self._note)  # libbpf keeps the pointer, so we keep the callback
        self._library.libbpf_set_print(self._quiet)
        self._link: int | None = None
        self._object: int | None = None
        self._object = self._pointer("open", self._library.bpf_object__open_file, os.fsencode(path), None)
        if self._library.bpf_object__load(ctypes.c_void_p(self._object)):
            raise self._refusal("load")

    def attach(self, program: str, cgroup: int) -> None:
        """Attach `program` to the cgroup with this file descriptor, by a link that ends with the process."""
        handle = self._find(self._library.bpf_object__find_program_by_name, program)
        attach = self._library.bpf_program__attach_cgroup
        self._link = self._pointer("attach", attach, handle, ctypes.c_int(cgroup))

    def map_descriptor(self, name: str, value_size: int) -> int:
        """Return the file descriptor of a map whose values must have `value_size` bytes."""
        handle = self._find(self._library.bpf_object__find_map_by_name, name)
        actual = self._library.bpf_map__value_size(handle)
        if actual != value_size:
            raise RuntimeError(f"map {name} has values of {actual} bytes, but Python expects {value_size}")
        return int(self._library.bpf_map__fd(handle))

    def program_descriptor(self, name: str) -> int:
        """Return the file descriptor of a loaded program."""
        handle = self._find(self._library.bpf_object__find_program_by_name, name)
        return int(self._library.bpf_program__fd(handle))

    def lookup(self, descriptor: int, key: ctypes.c_int, value: ctypes.Structure | ctypes.c_uint64) -> None:
        """Read one value of a map into `value`; raise `OSError` if there is none."""
        self._call(self._library.bpf_map_lookup_elem, descriptor, ctypes.byref(key), ctypes.byref(value))

    def update(self, descriptor: int, key: ctypes.c_int, value: ctypes.Structure) -> None:
        """Write one value of a map, atomically."""
        self._call(
            self._library.bpf_map_update_elem,
            descriptor,
            ctypes.byref(key),
            ctypes.byref(value),
            ctypes.c_uint64(0),
        )

    def close(self) -> None:
        """Detach and unload. Calling it again has no effect."""
        if self._link is not None:
            self._library.bpf_link__destroy(ctypes.c_void_p(self._link))
            self._link = None
        if self._object is not None:
            self._library.bpf_object__close(ctypes.c_void_p(self._object))
            self._object = None

    def _find(self, find: Callable[..., int | None], name: str) -> ctypes.c_void_p:
        if self._object is None:
            raise RuntimeError("the BPF object is closed")
        handle = find(ctypes.c_void_p(self._object), name.encode())
        if handle is None:
            raise RuntimeError(f"the BPF object does not have {name}")
        return ctypes.c_void_p(handle)

    def _pointer(self, purpose: str, function: Callable[..., int | None], *arguments: Any) -> int:
        ctypes.set_errno(0)
        pointer = function(*arguments)
        if pointer is None:
            raise self._refusal(purpose)
        return pointer

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        result = function(*arguments)
        if result < 0:
            raise OSError(-result, os.strerror(-result))

    def _note(self, level: int, form: bytes, arguments: int | None) -> int:
        """Keep libbpf's warnings for the error message, instead of printing them."""
        if level == _WARN:
            text = ctypes.create_string_buffer(4096)
            ctypes.CDLL(None).vsnprintf(text, ctypes.c_size_t(len(text)), form, ctypes.c_void_p(arguments))
            self._warnings += [line for line in text.value.decode(errors="replace").splitlines() if line]
        return 0

    def _refusal(self, purpose: str) -> TaggerUnavailable:
        """Close, and return the error of the last call."""
        error = ctypes.get_errno()
        self.close()
        missing = lacking(effective())
        if error in (errno.EPERM, errno.EACCES) or missing:
            lacks = f": {', '.join(missing)} missing" if missing else ""
            remedy = _CAPABILITIES_GIVEN_UP if given_up() else REMEDY
            return TaggerUnavailable(f"no permission to {purpose} an eBPF program{lacks}", remedy)
        if error == errno.ENOSYS:
            return TaggerUnavailable("this kernel has no eBPF", "use one with CONFIG_BPF_SYSCALL=y")
        reason = self._warnings[-1] if self._warnings else os.strerror(error)
        return TaggerUnavailable(
            f"the kernel refused to {purpose} its eBPF program ({reason})",
            "use Linux 5.10 or later with CONFIG_CGROUP_BPF=y",
        )


def lacking(capabilities: Collection[Capability]) -> list[str]:
    """Return the names of needed capabilities that are not held; CAP_SYS_ADMIN includes BPF and PERFMON."""
    either = {Capability.NET_ADMIN} if Capability.SYS_ADMIN in capabilities else set(REQUIRED)
    return [f"CAP_{capability.name}" for capability in REQUIRED if capability in either - set(capabilities)]

"""The compiled program in the formats of a Tofino's P4Runtime servers (`p4_device_config`).

Each server has its own format:
- Stratum: the protobuf message `stratum.hal.barefoot.BfPipelineConfig`
  (github.com/stratum/stratum, `stratum/hal/lib/barefoot/bf.proto`, written there by `bf_pipeline_builder`).
- PI, on which the SDE's own server is built: program name, binary, context.json, the pipeline's name and the
  BF-RT schema, each after its length, 32 bits little-endian (`_pi_update_device_start` in
  `pkgsrc/bf-drivers/src/pi/pi_imp.c` of open-p4studio).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import p4src
from controlplane.errors import WrongPipeline
from p4src.tofino import CPU_PORT_NOTE, configuration


class NotCompiled(WrongPipeline):
    """The compiler's output for a Tofino is missing or malformed."""


@dataclass(frozen=True)
class PackedPipeline:
    """One pipeline of a compiled program, and its hardware pipes."""

    name: str
    binary: bytes
    context: bytes
    scope: tuple[int, ...]


@dataclass(frozen=True)
class PackedProgram:
    """A compiled program: its BF-RT schema, and its pipelines."""

    name: str
    bfrt: bytes
    pipelines: tuple[PackedPipeline, ...]
    cpu_port: int | None = None
    """The device port that the program uses for the controller, if the compilation recorded it."""


def read_program(target: str, sde: Path | None = None, cpu_port: int | None = None) -> PackedProgram:
    """Read the output of `python -m p4src.compile target` under the SDE's installation.

    The paths are those in the compiler's own `.conf`, which bf_switchd reads too. `cpu_port` is that of the
    compilation that an error proposes.

    Raises:
        NotCompiled: The output is missing or malformed.
    """
    root = sde or p4src.sde_install()
    conf = configuration(target, root)
    compiling = f"python -m p4src.compile {target}"
    if cpu_port is not None:
        compiling += f" --cpu-port {cpu_port}"
    try:
        return _parse(json.loads(conf.read_text()), root)
    except OSError as error:
        raise NotCompiled(
            f"the program isn't compiled for {target}: {error.filename} can't be read ({error.strerror}); "
            f"run `{compiling}`, with SDE_INSTALL set if it is to go into an SDE"
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise NotCompiled(
            f"{conf} isn't what the compiler writes ({type(error).__name__}: {error}); "
            f"run `{compiling}` again"
        ) from None


def _parse(conf: Mapping[str, Any], root: Path) -> PackedProgram:
    (device,) = conf["p4_devices"]
    (program,) = device["p4_programs"]
    pipelines = tuple(
        PackedPipeline(
            pipeline["p4_pipeline_name"],
            (root / pipeline["config"]).read_bytes(),
            (root / pipeline["context"]).read_bytes(),
            tuple(int(pipe) for pipe in pipeline["pipe_scope"]),
        )
        for pipeline in program["p4_pipelines"]
    )
    if not pipelines:
        raise ValueError("no p4_pipelines")
    schema = root / program["bfrt-config"]
    noted = schema.with_name(CPU_PORT_NOTE)
    cpu_port = int(noted.read_text()) if noted.exists() else None
    return PackedProgram(program["program-name"], schema.read_bytes(), pipelines, cpu_port)


def check_cpu_port(program: PackedProgram, target: str, cpu_port: int) -> None:
    """Raise `NotCompiled` if the program is compiled for another CPU port than `cpu_port`."""
    if program.cpu_port not in (None, cpu_port):
        raise NotCompiled(
            f"the program is compiled for CPU port {program.cpu_port}, and the switch's is {cpu_port}: run "
            f"`python -m p4src.compile {target} --cpu-port {cpu_port}`, or correct `cpu_port` in the job"
        )


def pack(program: PackedProgram, p4runtime: str) -> bytes:
    """Return the program for the P4Runtime server `stratum` or `pi`."""
    return _for_stratum(program) if p4runtime == "stratum" else _for_pi(program)


def _for_pi(program: PackedProgram) -> bytes:
    if len(program.pipelines) != 1:
        raise NotCompiled(
            f"PI takes programs of one pipeline, and {program.name} has {len(program.pipelines)}"
        )
    pipeline = program.pipelines[0]
    parts = (program.name.encode(), pipeline.binary, pipeline.context, pipeline.name.encode(), program.bfrt)
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _for_stratum(program: PackedProgram) -> bytes:
    message = stratum_message()
    message.p4_name = program.name
    message.bfruntime_info = program.bfrt
    for pipeline in program.pipelines:
        message.profiles.add(
            profile_name=pipeline.name,
            context=pipeline.context,
            binary=pipeline.binary,
            pipe_scope=pipeline.scope,
        )
    return bytes(message.SerializeToString(deterministic=True))


def stratum_message() -> Any:
    """Return an empty `BfPipelineConfig`."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="checkmate/bf_pipeline_config.proto", package="checkmate.tofino", syntax="proto3"
    )
    config = file.message_type.add(name="BfPipelineConfig")
    profile = config.nested_type.add(name="Profile")
    repeated, single = kinds.LABEL_REPEATED, kinds.LABEL_OPTIONAL
    for message, name, number, kind, label in (
        (config, "p4_name", 1, kinds.TYPE_STRING, single),
        (config, "bfruntime_info", 2, kinds.TYPE_BYTES, single),
        (config, "profiles", 3, kinds.TYPE_MESSAGE, repeated),
        (profile, "profile_name", 1, kinds.TYPE_STRING, single),
        (profile, "context", 2, kinds.TYPE_BYTES, single),
        (profile, "binary", 3, kinds.TYPE_BYTES, single),
        (profile, "pipe_scope", 4, kinds.TYPE_UINT32, repeated),
    ):
        field = message.field.add(name=name, number=number, type=kind, label=label)
        if kind == kinds.TYPE_MESSAGE:
            field.type_name = ".checkmate.tofino.BfPipelineConfig.Profile"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("checkmate.tofino.BfPipelineConfig")
    return message_factory.GetMessageClass(descriptor)()

"""Compile the data plane with a Tofino compiler, and write the output to the SDE's folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from p4src import PIPE, ROOT, artifacts, sde_install

PROGRAM = "checkmate_tna"
ARCHITECTURES = {"tofino": "tna", "tofino2": "t2na"}
CPU_PORTS = {"tofino": 192, "tofino2": 0}
"""The controller's device ports, the defaults of checkmate_tna.p4."""
CPU_PORT_NOTE = "cpu_port"
"""A file beside the schema, with the port that the program was compiled for."""
DRIVERS = ("bf-p4c", "p4c")
"""Names of the compiler's driver: in Intel's SDE, and in open-p4studio or built from p4c."""
P4INFO = f"{PROGRAM}.p4info.txtpb"
SCHEMA = f"{PROGRAM}.bf-rt.json"
PIPES = 4
"""The maximum; chips with fewer pipes ignore the others."""
_P4INFO = "p4info.txt"
"""Every compiler supports this suffix; `.txtpb` dates from 2024."""
_SELECTED = ("0x0800", "0x0101080a", "0xfd10c4ec")
"""Values that the parser selects on, as in the assembly: IPv4, timestamps, the tag."""
_PCIE = "/sys/devices/pci0000:00/0000:00:03.0/0000:05:00.0"
_FIRMWARE = "share/tofino_sds_fw/avago/firmware"
_MISSING = """\
No p4c with a Tofino backend: neither bf-p4c nor p4c on PATH lists {target} (`p4c --target-help`).
It comes with an SDE (9.7 or later, `$SDE_INSTALL/bin`), with open-p4studio (github.com/p4lang/open-p4studio),
or from p4c itself (github.com/p4lang/p4c, cmake -DENABLE_TOFINO=ON). P4C_TOFINO specifies another path.
Only loading a Tofino needs it: the files for the control plane are in p4src/build/{target}.
"""


def _place(target: str) -> Path:
    return Path("share") / f"{target}pd" / PROGRAM


def output_folder(target: str) -> Path:
    """Return the folder with the BF-RT schema, and with context.json, binary and logs of each pipeline."""
    return sde_install().absolute() / _place(target)


def configuration(target: str, sde: Path | None = None) -> Path:
    """Return the file for `bf_switchd --conf-file`; its paths are relative to the SDE's root."""
    return (sde or sde_install().absolute()) / "share" / "p4" / "targets" / target / f"{PROGRAM}.conf"


def driver(target: str) -> str | None:
    """Return the driver of a compiler for `target`: `P4C_TOFINO`, or one on PATH or in the SDE."""
    if override := os.environ.get("P4C_TOFINO"):
        return shutil.which(os.path.abspath(override))
    places = os.pathsep.join((os.environ.get("PATH", ""), str(sde_install() / "bin")))
    for name in DRIVERS:
        if path := shutil.which(name, path=places):
            target_help = subprocess.run([path, "--target-help"], capture_output=True, text=True, check=False)
            if f"{target}-{ARCHITECTURES[target]}" in target_help.stdout + target_help.stderr:
                return os.path.abspath(path)
    return None


def compile_program(target: str, cpu_port: int | None = None) -> int:
    """Compile for `target`, with the default or another CPU port, and return the exit status.

    Committed files are replaced only at the end, because the drivers delete files in their output folder.
    """
    folder, committed, compiler = output_folder(target), artifacts(target), driver(target)
    if wrong := _check_inputs(target, folder, compiler):
        sys.stderr.write(wrong)
        return 2
    cpu_port = CPU_PORTS[target] if cpu_port is None else cpu_port
    try:
        for directory in (folder, committed, configuration(target).parent):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}; SDE_INSTALL specifies the output folder\n")
        return 2
    command = [str(compiler), "--std", "p4-16", "--target", target, "--arch", ARCHITECTURES[target]]
    command += ["-g", "-o", str(folder), "--bf-rt-schema", str(folder / "bf-rt.json")]
    command += ["--p4runtime-force-std-externs", "--p4runtime-files", str(folder / _P4INFO)]
    command += [f"-DCHECKMATE_CPU_PORT={cpu_port}"]
    for output in (folder / PIPE / f"{target}.bin", configuration(target)):
        output.unlink(missing_ok=True)
    status = subprocess.run([*command, f"{PROGRAM}.p4"], cwd=ROOT, check=False).returncode
    if status == 0 and (wrong := _wrong_output(folder, target)):
        sys.stderr.write(f"{command[0]}: {wrong}\n")
        return 1
    if status == 0:
        (folder / CPU_PORT_NOTE).write_text(f"{cpu_port}\n")
        configuration(target).write_text(json.dumps(driver_configuration(target), indent=4) + "\n")
        shutil.copyfile(folder / _P4INFO, committed / P4INFO)
        shutil.copyfile(folder / "bf-rt.json", committed / SCHEMA)
        sys.stdout.write(f"{target}: {configuration(target)}\n")
    return status


def _check_inputs(target: str, folder: Path, compiler: str | None) -> str | None:
    if compiler is None:
        if override := os.environ.get("P4C_TOFINO"):
            return f"P4C_TOFINO={override}: not found; it must be the driver of a p4c with a Tofino backend\n"
        return _MISSING.format(target=target)
    if bad_paths := [path for path in (folder, ROOT) if any(map(str.isspace, str(path)))]:
        return (
            f"{bad_paths[0]}: p4c's driver does not support spaces in paths, and would delete other files\n"
        )
    return None


def _wrong_output(folder: Path, target: str) -> str | None:
    """Return an error if a compiler that exited with 0 has not written everything."""
    pipe = (f"{target}.bin", "context.json", f"{PROGRAM}.bfa")
    for name in (_P4INFO, "bf-rt.json", *(f"{PIPE}/{file}" for file in pipe)):
        if not (folder / name).is_file():
            return f"exited with 0, but has not written {folder / name}"
    assembly = (folder / PIPE / f"{PROGRAM}.bfa").read_text()
    if missing := [value for value in _SELECTED if f" {value}:" not in assembly]:
        return (
            f"the parser does not select {', '.join(missing)}: p4c since 1.2.5.11 loses them (p4lang/p4c "
            "issue 5752), until pull request 5753"
        )
    return None


def driver_configuration(target: str) -> dict[str, Any]:
    """Return the configuration of `bf_switchd`, which not every driver writes."""
    folder = _place(target)
    pipeline = {
        "p4_pipeline_name": PIPE,
        "context": str(folder / PIPE / "context.json"),
        "config": str(folder / PIPE / f"{target}.bin"),
        "pipe_scope": list(range(PIPES)),
        "path": str(folder),
    }
    program = {
        "program-name": PROGRAM,
        "bfrt-config": str(folder / "bf-rt.json"),
        "p4_pipelines": [pipeline],
    }
    chip = {"chip_family": target, "instance": 0, "pcie_sysfs_prefix": _PCIE, "sds_fw_path": _FIRMWARE}
    device = {"device-id": 0, "p4_programs": [program], "agent0": "lib/libpltfm_mgr.so"}
    return {"chip_list": [chip], "p4_devices": [device]}

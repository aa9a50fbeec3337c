"""Compile the data plane with a Tofino compiler, and put its output where the SDE looks for it."""

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
DRIVERS = ("bf-p4c", "p4c")
"""Names of the compiler's driver: in Intel's SDE, and in open-p4studio or built from p4c."""
P4INFO = f"{PROGRAM}.p4info.txtpb"
SCHEMA = f"{PROGRAM}.bf-rt.json"
PIPES = 4
"""At most; a chip that has fewer leaves the others out."""
_PCIE = "/sys/devices/pci0000:00/0000:00:03.0/0000:05:00.0"
_FIRMWARE = "share/tofino_sds_fw/avago/firmware"
_MISSING = """\
No p4c with a Tofino backend: neither bf-p4c nor p4c on PATH lists {target} (`p4c --target-help`).
It comes with an SDE (9.7 or later, `$SDE_INSTALL/bin`), with open-p4studio (github.com/p4lang/open-p4studio),
or from p4c itself (github.com/p4lang/p4c, cmake -DENABLE_TOFINO=ON). P4C_TOFINO names another path.
Nothing but loading a Tofino needs it: what the control plane reads is in p4src/build/{target}.
"""


def output_folder(target: str) -> Path:
    """BF-RT schema, and in a folder for each pipeline context.json, binary and logs."""
    return sde_install().absolute() / "share" / f"{target}pd" / PROGRAM


def configuration(target: str) -> Path:
    """What `bf_switchd --conf-file` reads; its paths are relative to the SDE's root."""
    return sde_install().absolute() / "share" / "p4" / "targets" / target / f"{PROGRAM}.conf"


def driver(target: str) -> str | None:
    """The driver of a compiler that knows `target`."""
    for name in filter(None, (os.environ.get("P4C_TOFINO"), *DRIVERS)):
        if path := shutil.which(name):
            help_ = subprocess.run([path, "--target-help"], capture_output=True, text=True, check=False)
            if f"{target}-{ARCHITECTURES[target]}" in help_.stdout + help_.stderr:
                return path
    return None


def compile_program(target: str, cpu_port: int | None = None) -> int:
    """Compile for `target`; the exit status. `cpu_port` is the device port where it isn't the usual one."""
    compiler = driver(target)
    if compiler is None:
        sys.stderr.write(_MISSING.format(target=target))
        return 2
    folder, committed = output_folder(target), artifacts(target)
    for each in (folder, committed, configuration(target).parent):
        each.mkdir(parents=True, exist_ok=True)
    command = [compiler, "--std", "p4-16", "--target", target, "--arch", ARCHITECTURES[target]]
    command += ["-g", "-o", str(folder), "--bf-rt-schema", str(folder / "bf-rt.json")]
    command += [
        "--p4runtime-force-std-externs",
        "--p4runtime-files",
        str((committed / P4INFO).relative_to(ROOT)),
    ]
    if cpu_port is not None:
        command += [f"-DCHECKMATE_CPU_PORT={cpu_port}"]
    binary = folder / PIPE / f"{target}.bin"
    binary.unlink(missing_ok=True)
    status = subprocess.run([*command, f"{PROGRAM}.p4"], cwd=ROOT, check=False).returncode
    if status == 0 and not binary.is_file():
        sys.stderr.write(f"{compiler} said nothing, but hasn't written {binary}\n")
        status = 1
    if status == 0:
        configuration(target).write_text(json.dumps(_configuration(target), indent=4) + "\n")
        shutil.copyfile(folder / "bf-rt.json", committed / SCHEMA)
        sys.stdout.write(f"{target}: {configuration(target)}\n")
    return status


def _configuration(target: str) -> dict[str, Any]:
    """What `bf_switchd` reads, with paths as it wants them. Written here, since not every driver does."""
    folder = output_folder(target).relative_to(sde_install().absolute())
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

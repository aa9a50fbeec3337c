"""Run the packet suites on a running embedded target, with the port numbers of a 32-port Tofino.

`python -m tests.scripts.standing_switch FOLDER OPTION...`, as root: it exits with the status of the suites.
Everything runs in a network namespace that ends with this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from checkmate.job.tofino.chips import front_panel
from ptf_tests.packets import PORTS
from ptf_tests.stage import namespace
from ptf_tests.stage.targets import tied_to

ADDRESS = "127.0.0.1:9560"


def main() -> int:
    folder, *options = sys.argv[1:]
    panel = front_panel("wedge100bf-32x-odd")
    device_ports = {port: panel[f"{port}/0"] for port in PORTS}
    namespace.enter()
    namespace.add_links((f"t{port}", f"s{port}") for port in PORTS)
    file = Path(folder) / "switch.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "target": "softswitch",
                "address": ADDRESS,
                "device_id": 7,
                "cpu_port": 510,
                "ports": {port: {"port": device_ports[port], "interface": f"t{port}"} for port in PORTS},
            }
        )
    )
    switch = [sys.executable, "-m", "softswitch", "--no-p4", "--device-id", "7"]
    for port, number in device_ports.items():
        switch += ["-i", f"{number}@s{port}"]
    switch += ["--", "--cpu-port", "510", "--grpc-server-addr", ADDRESS]
    with subprocess.Popen([*tied_to(os.getpid()), *switch], stdout=subprocess.DEVNULL) as process:
        try:
            suites = [sys.executable, "-m", "ptf_tests", "--config", str(file), *options]
            return subprocess.run(suites, check=False).returncode
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())

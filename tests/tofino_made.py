"""Files of the shape that the compiler leaves for a Tofino."""

from __future__ import annotations

import json
from pathlib import Path

P4INFO = "checkmate_tna.p4info.txtpb"


def write_compiled(sde: Path, target: str, binary: bytes, context: bytes) -> Path:
    """`make p4 P4_TARGET=target` under an SDE's installation; its `.conf`."""
    folder = Path("share") / f"{target}pd" / "checkmate_tna"
    (sde / folder / "pipe").mkdir(parents=True)
    (sde / folder / "bf-rt.json").write_text('{"tables": []}')
    (sde / folder / "pipe" / "context.json").write_bytes(context)
    (sde / folder / "pipe" / f"{target}.bin").write_bytes(binary)
    pipeline = {
        "p4_pipeline_name": "pipe",
        "context": f"{folder}/pipe/context.json",
        "config": f"{folder}/pipe/{target}.bin",
        "pipe_scope": [0, 1, 2, 3],
        "path": str(folder),
    }
    program = {
        "program-name": "checkmate_tna",
        "bfrt-config": f"{folder}/bf-rt.json",
        "p4_pipelines": [pipeline],
    }
    conf = sde / "share" / "p4" / "targets" / target / "checkmate_tna.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(json.dumps({"p4_devices": [{"device-id": 0, "p4_programs": [program]}]}))
    return conf

"""Files in the layout of the compiler's output for a Tofino."""

from __future__ import annotations

import json
from pathlib import Path

from p4src import tofino


def write_compiled(sde: Path, target: str, binary: bytes, context: bytes) -> Path:
    """Write files like `make p4 P4_TARGET=target` below an SDE's installation; return the `.conf`."""
    folder = Path("share") / f"{target}pd" / "checkmate_tna"
    (sde / folder / "pipe").mkdir(parents=True)
    (sde / folder / "bf-rt.json").write_text('{"tables": []}')
    (sde / folder / "pipe" / "context.json").write_bytes(context)
    (sde / folder / "pipe" / f"{target}.bin").write_bytes(binary)
    conf = tofino.configuration(target, sde)
    conf.parent.mkdir(parents=True)
    conf.write_text(json.dumps(tofino.driver_configuration(target)))
    return conf

"""`python -m topologies.traffic.rank_main`: one rank of a lab's ring. All ranks get the same job file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from checkmate.ring.connections import RingError
from checkmate.tagger import TaggerError
from topologies.traffic.config import read_config
from topologies.traffic.rank import RingJob, run_rank


def main() -> int:
    """Return 0 if everything was gathered and checked, 1 if not, 2 for an invalid job file."""
    parser = argparse.ArgumentParser(
        prog="python -m topologies.traffic.rank_main",
        description=__doc__,
        epilog="example: python -m topologies.traffic.rank_main --config ring.json --rank 0 --result r0.json",
    )
    parser.add_argument("--config", required=True, help="the job, as JSON (see RingJob)")
    parser.add_argument("--rank", required=True, type=int, help="this rank, from 0")
    parser.add_argument("--result", help="where to write the result as JSON; default: standard output")
    arguments = parser.parse_args()
    job = read_config(arguments.config, RingJob)
    if job is None:
        return 2
    torch.set_num_threads(1)  # a lab's ranks share one machine
    try:
        result = run_rank(job, arguments.rank).model_dump_json(indent=1) + "\n"
        if arguments.result:
            Path(arguments.result).write_text(result)
        else:
            sys.stdout.write(result)
    except (RingError, TaggerError, OSError) as error:
        print(error if isinstance(error, RingError) else f"rank {arguments.rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

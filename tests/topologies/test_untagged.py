"""The control of labs, which trains without tags and shadow nodes, averages as Checkmate does."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from testbed.jobs import job_data
from tests.support.training.rank_processes import RankProcesses
from topologies.training.unprotected import Untagged


def two_hosts(folder: Path) -> Path:
    """Write a job of two hosts with two ranks each, on loopback."""
    data = job_data(ranks=2)
    group_ranks = data["dp_groups"][0]["ranks"]
    data["hosts"] = [{"name": f"h{h}", "nics": [nic(h, rank)]} for h, rank in enumerate(group_ranks)]
    groups = [[{"rank": 2 * h + i, "host": f"h{h}"} for h in range(2)] for i in range(2)]
    data["dp_groups"] = [{"ranks": ranks} for ranks in groups]
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def nic(host: int, rank: dict[str, Any]) -> dict[str, Any]:
    """Return the interface of a host, with an address that other tests do not use."""
    ip = f"127.74.{os.getpid() % 250}.{host + 1}"
    return {"ip": ip} | {key: rank[key] for key in ("mac", "switch", "port")}


def average(rank: int, count: int, job_file: str) -> bool:
    """Return whether gradients are the average of all ranks' gradients."""
    os.environ |= {"CHECKMATE_JOB": job_file, "CHECKMATE_INSECURE": "1", "RANK": str(rank)}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    alone, ddp = copy.deepcopy(model), DistributedDataParallel(model)
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    with Untagged(ddp):
        for trained_model in (ddp, alone):
            trained_model(rows).square().mean().backward()
    same = []
    for averaged, single in zip(model.parameters(), alone.parameters(), strict=True):
        assert averaged.grad is not None and single.grad is not None
        dist.all_reduce(single.grad)
        same.append(torch.allclose(averaged.grad, single.grad / count, rtol=1e-6, atol=1e-7))
    return all(same)


def test_all_ranks_of_hosts_with_several_are_averaged(ranks: RankProcesses, tmp_path: Path) -> None:
    assert ranks.run(4, average, str(two_hosts(tmp_path))) == [True] * 4

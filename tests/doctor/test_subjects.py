"""For whom a host is checked: by its addresses, or as an option names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checkmate.doctor.diagnosis import ring_addresses
from checkmate.doctor.subjects import NoSubject, any_host, choose, controller, guess, shadow
from checkmate.job.schema import Job
from checkmate.job.validation import of_data
from checkmate.keys.roles import Role
from checkmate.wire.ring_sockets import REPAIR_PORT, RING_PORT, TREE_PORT
from testbed.jobs import job
from tests.support.job_files import meshed

GPT = job("gpt", ranks=3, nodes=2)
"""Ranks 0 to 2 at 10.0.0.1 to .3 and 192.168.0.0 to .2; nodes 0 and 1 at 192.168.100.0 and .1."""


def here(*addresses: str) -> Callable[[str], bool]:
    return lambda host: host in addresses


@pytest.mark.parametrize(
    ("addresses", "controls", "name", "by"),
    [
        (("10.0.0.2",), False, "rank 1 (192.168.0.1) of job gpt", "10.0.0.2"),
        (("10.0.64.4",), False, "shadow node 1 of job gpt", "10.0.64.4"),
        (("192.168.100.0",), False, "shadow node 0 of job gpt", "192.168.100.0"),
        (("10.0.64.1",), True, "shadow node 0 of job gpt", "10.0.64.1"),
        ((), True, "the controller of job gpt", "keys of role controller"),
    ],
)
def test_a_host_is_known_by_its_addresses(
    addresses: tuple[str, ...], controls: bool, name: str, by: str
) -> None:
    subject = guess(GPT, here(*addresses), role=None, controls=controls)
    assert (subject.name, by in subject.guessed) == (name, True)


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ((), "has no address of rank 0 "),
        (("10.0.0.1", "10.0.64.1"), "addresses of rank 0 (192.168.0.0) of job gpt, shadow node 0 of job gpt"),
    ],
)
def test_what_is_not_clear_is_not_guessed(addresses: tuple[str, ...], words: str) -> None:
    with pytest.raises(NoSubject) as error:
        guess(GPT, here(*addresses), role=None, controls=False)
    assert words in str(error.value)
    assert "--role" in str(error.value)


def test_a_role_limits_the_guess() -> None:
    both = here("10.0.0.1", "10.0.64.1")
    assert guess(GPT, both, role=Role.SHADOW, controls=False) == _with_guess(shadow(GPT, 0), "10.0.64.1")


def _with_guess(subject: Any, address: str) -> Any:
    return type(subject)(**{**vars(subject), "guessed": f"{address} is an address of this host"})


@pytest.mark.parametrize(
    ("role", "number", "host", "name"),
    [
        (None, 1, None, "shadow node 1 of job gpt"),
        (Role.TRAINER, 1, None, "rank 1 (192.168.0.1) of job gpt"),
        (None, None, "10.0.0.3", "rank 2 (192.168.0.2) of job gpt"),
        (None, None, "192.168.100.1", "shadow node 1 of job gpt"),
        (Role.CONTROLLER, None, None, "the controller of job gpt"),
    ],
)
def test_a_host_can_be_named(role: Role | None, number: int | None, host: str | None, name: str) -> None:
    assert choose(GPT, role, number, host).name == name


@pytest.mark.parametrize(
    ("role", "number", "host", "words"),
    [
        (None, 7, None, "job gpt does not have shadow node 7; it has shadow node 0, shadow node 1"),
        (Role.TRAINER, 7, None, "job gpt does not have rank 7; it has rank 0"),
        (None, None, "gpu9", "does not have the host gpu9"),
        (Role.CONTROLLER, 0, None, "leave them out"),
        (None, 0, "gpu9", "give one of them"),
    ],
)
def test_a_host_that_does_not_exist_is_refused_with_those_that_do(
    role: Role | None, number: int | None, host: str | None, words: str
) -> None:
    with pytest.raises(NoSubject) as error:
        choose(GPT, role, number, host)
    assert words in str(error.value)
    assert error.value.exit_code == 2


def test_a_host_with_several_ranks_has_all_its_interfaces() -> None:
    meshed_job = of_data(Job, _placed(meshed(replicate=2, shard=2, gpus=2, nics=2)))
    subject = choose(meshed_job, None, None, "gpu1")
    assert [rank.rank for rank in subject.ranks] == [2, 3]
    assert [str(nic.ip) for nic in subject.nics] == ["10.8.0.3", "10.8.0.4"]


def _placed(data: dict[str, Any]) -> dict[str, Any]:
    from checkmate.job.placing import place  # noqa: PLC0415

    place(data)
    return data


def test_the_first_and_the_last_rank_of_a_ring_tag() -> None:
    assert [choose(GPT, Role.TRAINER, rank, None).is_tagging for rank in range(3)] == [True, False, True]
    assert any_host(Role.TRAINER).is_tagging
    assert not controller(GPT).is_tagging


def test_a_rank_listens_for_the_ring_and_for_what_is_sent_again() -> None:
    """Ports of repairs only if copies may be lost."""
    lossless = replace(job("gpt", ranks=3, nodes=1), channels=2)
    ranks = lossless.dp_groups[0].ranks[1:2]
    assert ring_addresses(lossless, ranks) == [(str(ranks[0].ip), RING_PORT + n) for n in range(2)]
    addresses = ring_addresses(replace(lossless, lossless=False), ranks)
    assert addresses[2:] == [(str(ranks[0].ip), REPAIR_PORT)]
    in_trees = replace(lossless, collective="tree", tree_bytes=1)
    assert ring_addresses(in_trees, ranks)[2:] == [(str(ranks[0].ip), TREE_PORT + n) for n in range(12)]

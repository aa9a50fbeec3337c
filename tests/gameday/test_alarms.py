"""The oracle of alerts, and the rules with shorter times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gameday.acts import Act
from tests.gameday.alarms import RECOVERY, Alarm, Expectation, expectations, judge
from tests.gameday.prometheus import rules as shipped
from tests.gameday.prometheus import spans
from tests.gameday.rules import Delays, delays, faster, seconds

DELAYS = delays(faster(shipped()))
NAMES = {"ddp": "lab", "hsdp": "hsdp", "fsdp": "fsdp"}


def alert_texts(*acts: Act) -> tuple[set[str], set[str]]:
    """Return what must fire, and what may."""
    expected = expectations(acts, DELAYS, NAMES)
    return {str(expectation) for expectation in expected if expectation.must}, {
        str(expectation) for expectation in expected if not expectation.must
    }


def test_times_of_the_rules_are_a_quarter() -> None:
    assert DELAYS["CheckmateSwitchDown"] == Delays(15, 0)
    assert DELAYS["CheckmateNoPrimaryController"] == Delays(7.5, 0)
    assert DELAYS["CheckmateCopiesLost"] == Delays(0, 75)
    assert seconds("1m30s500ms") == 90.5
    rules: dict[str, Any] = {"groups": [{"name": "x", "rules": [{"alert": "A", "expr": "a[1h] > 0"}]}]}
    assert faster(rules)["groups"][0]["rules"] == [{"alert": "A", "expr": "a[900000ms] > 0"}]


def test_everything_that_is_expected_has_a_rule() -> None:
    acts = [Act(0, "kill", "tor0", 60), Act(0, "kill", "ddp.shadow0", 60), Act(0, "kill", "ddp.shadow1", 60)]
    acts += [
        Act(0, "fill", "ddp.disk", 200),
        Act(0, "kill", "ctl0", 60),
        Act(0, "kill", "ctl1", 60),
        Act(0, "down", "ddp.shadow2", 60),
    ]
    assert {expectation.name for expectation in expectations(acts, DELAYS, NAMES)} <= DELAYS.keys()


@pytest.mark.parametrize(
    "act",
    [
        Act(0, "kill", "ddp.rank1"),
        Act(0, "stall", "ddp.rank1", 5),
        Act(0, "stall", "ddp.shadow1", 8),
        Act(0, "kill", "ctl0", 60),
        Act(0, "fill", "ddp.disk", 10),
    ],
)
def test_what_fires_no_alert(act: Act) -> None:
    assert alert_texts(act) == (set(), set())


def test_a_node_that_is_away_misses_copies_if_its_job_trains() -> None:
    copies_lost = "CheckmateCopiesLost(job lab, node 2)"
    assert alert_texts(Act(0, "kill", "ddp.shadow2", 12)) == ({copies_lost}, set())
    assert alert_texts(Act(0, "kill", "ddp.shadow2", 2)) == (set(), {copies_lost})
    assert alert_texts(Act(0, "kill", "ddp.shadow2", 12), Act(1, "kill", "ddp.rank0")) == (
        set(),
        {copies_lost},
    )
    assert alert_texts(Act(0, "kill", "ddp.shadow2", 12), Act(1, "kill", "hsdp.rank0"))[0] == {copies_lost}


def test_a_node_to_which_hosts_copy_may_be_slow_and_no_switch_counts_what_it_misses() -> None:
    may = {"CheckmateIterationsLeftOut(job fsdp, node 1)", "CheckmateStepsWait(job fsdp, node 1)"}
    assert alert_texts(Act(0, "kill", "fsdp.shadow1", 12)) == (set(), may)
    assert alert_texts(Act(0, "stall", "fsdp.shadow1", 5)) == (set(), may)


def test_a_shard_without_holder() -> None:
    both = [Act(at, "kill", f"ddp.shadow{at}", 26) for at in (0, 1)]
    must, may = alert_texts(*both)
    assert "CheckmateShardWithoutHolder(dp_group 0, job lab, shard 0)" in must
    assert not [alert for alert in (*must, *may) if "shard 1" in alert or "shard 2" in alert]
    short = [Act(0, "kill", f"ddp.shadow{node}", 2) for node in (0, 1)]
    assert not [alert for group in alert_texts(*short) for alert in group if "Holder" in alert]
    resumes = alert_texts(*short, Act(0.4, "kill", "ddp.rank0"))[1]
    assert "CheckmateShardWithoutHolder(dp_group 0, job lab, shard 0)" in resumes


def test_a_disk_that_is_full_for_long() -> None:
    behind = "CheckmateCheckpointsBehind(job hsdp)"
    assert alert_texts(Act(0, "fill", "hsdp.disk", 110)) == ({behind}, set())
    assert alert_texts(Act(0, "fill", "hsdp.disk", 80)) == (set(), {behind})


def test_no_controller_and_a_switch_that_is_away() -> None:
    must, _ = alert_texts(Act(0, "kill", "ctl0", 16), Act(0, "kill", "ctl1", 16))
    assert must == {
        "CheckmateNoPrimaryController()",
        *(f"CheckmateNoPrimaryController(switch tor{number})" for number in range(3)),
    }
    must, _ = alert_texts(Act(0, "kill", "tor1", 26))
    assert must == {"CheckmateNoPrimaryController(switch tor1)", "CheckmateSwitchDown(switch tor1)"}
    must, may = alert_texts(Act(0, "kill", "tor1", 1))
    assert not [alert for alert in (*must, *may) if "Primary" in alert or "Down" in alert]


def test_alerts_are_judged_by_name_labels_and_time() -> None:
    must = Expectation("A", {"job": "x"}, 10, 30, must=True)
    may = Expectation("B", {}, 10, 30, must=False)
    fired = Alarm(12, 40, "A", {"job": "x", "node": "1"})
    assert judge([must, may], [fired]) == []
    assert judge([may], []) == []
    assert judge([must], []) == ["did not fire, after 10 s: A(job x)"]
    unfitting_alarms = [Alarm(at, at + 1, "A", {"job": job}) for at, job in ((8, "x"), (31, "x"), (12, "y"))]
    for unfitting in unfitting_alarms:
        assert judge([must], [unfitting])[0] == "did not fire, after 10 s: A(job x)"
        assert judge([must], [fired, unfitting]) == [
            f"fired without a cause, at {unfitting.at} s: {unfitting}"
        ]


def test_an_alert_that_still_fires_need_not_begin_again() -> None:
    early = Expectation("A", {"job": "x"}, 0, 8, must=True)
    must = Expectation("A", {"job": "x"}, 10, 30, must=True)
    assert judge([early, must], [Alarm(5, 15, "A", {"job": "x"})]) == []
    assert len(judge([early, must], [Alarm(5, 9, "A", {"job": "x"})])) == 1


def test_the_times_of_an_alert_are_those_of_its_values() -> None:
    values = [[at, "1"] for at in (100, 101, 102, 110, 111)]
    series = {"metric": {"alertname": "A", "severity": "warning", "job": "x"}, "values": values}
    assert [*spans(series, 90)] == [Alarm(10, 12, "A", {"job": "x"}), Alarm(20, 21, "A", {"job": "x"})]


def test_a_window_ends_when_an_alert_cannot_begin_any_more() -> None:
    (expectation,) = expectations([Act(100, "kill", "hsdp.shadow1", 12)], DELAYS, NAMES)
    assert (expectation.since, expectation.until) == (100, 112 + RECOVERY + 75)

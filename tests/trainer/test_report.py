"""Reports as people and programs read them."""

import json

from ckpt_engine.commands import status as status_command
from ckpt_engine.core.message_json import read_json
from ckpt_engine.core.sizes import human_bytes
from ckpt_engine.report import UpdateReport
from ckpt_engine.v1 import manager_pb2, weights_pb2


def report() -> UpdateReport:
    message = manager_pb2.UpdateReport(
        fence=weights_pb2.Fence(cluster="c", epoch=9),
        identity=weights_pb2.Identity(lineage="run", version=4, root=bytes(range(32))),
        seconds=1.5,
        bytes=3_000_000,
        tensors=2,
        stages=[
            manager_pb2.StageSeconds(stage=manager_pb2.STAGE_PLAN, seconds=0.5),
            manager_pb2.StageSeconds(stage=manager_pb2.STAGE_TRANSFER, seconds=0.25),
        ],
    )
    good = message.replicas.add(
        replica="b", outcome=manager_pb2.OUTCOME_NEW_SERVING, bytes=3_000_000, sync_seconds=0.75, pause_seconds=0.5
    )
    good.workers.add(rank=0, verified=2, transfer_seconds=0.002)
    good.workers.add(rank=1, verified=1, transfer_seconds=0.003)
    good.edges.add(transport="file", reason="a directory", bytes=1_000_000)
    good.edges.add(transport="shared_memory", reason="one host", bytes=500_000)
    good.edges.add(worker_rank=1, transport="shared_memory", reason="one host", bytes=1_500_000)
    bad = message.replicas.add(replica="a", outcome=manager_pb2.OUTCOME_QUARANTINED)
    bad.problem.message = "its agent was lost"
    return UpdateReport(message)


def test_a_report_tells_each_replica() -> None:
    said = report()
    assert not said.ok
    assert (said.version, said.lineage, said.epoch, said.root[:6]) == (4, "run", 9, "000102")
    assert said.stages == {"plan": 0.5, "transfer": 0.25}
    bad, good = said.replicas
    assert (bad.name, bad.outcome, bad.ok, bad.verified, bad.problem) == (
        "a", "quarantined", False, False, "its agent was lost",
    )  # fmt: skip
    assert (good.name, good.outcome, good.ok, good.verified, good.problem) == ("b", "new_serving", True, True, "")
    assert good.gigabytes_per_second == 1.0
    assert [(use.transport, use.nbytes, use.edges) for use in good.transports] == [
        ("shared_memory", 2_000_000, 2),
        ("file", 1_000_000, 1),
    ]


def test_a_worker_with_a_problem_is_not_verified() -> None:
    said = report()
    said.message.replicas[0].workers[1].problem.message = "differs"
    assert not said.replicas[1].verified


def test_its_details_are_a_table_with_the_problems_below() -> None:
    lines = report().details.splitlines()
    assert lines[0].startswith("version 4 of run (root 000102030405, epoch 9): 2 tensors, 3.0 MB to 1 of 2 replicas")
    assert "NOT OK" in lines[0]
    assert lines[1].split() == ["replica", "outcome", "bytes", "sync", "pause", "GB/s", "transport"]
    assert lines[2].split() == ["a", "quarantined", "0", "B", "0.000", "s", "0.000", "s", "0.00", "-"]
    assert lines[3].endswith("shared_memory, file")
    assert lines[4] == "a: its agent was lost"


def test_a_report_that_is_ok_without_all_says_so() -> None:
    message = report().message
    message.ok = message.verified = True
    message.replicas[1].outcome = manager_pb2.OUTCOME_NOT_REACHED
    lines = UpdateReport(message).details.splitlines()
    assert lines[0].endswith("to 1 of 2 replicas in 1.50 s, verified, as many as were asked for")
    assert lines[2].split()[:2] == ["a", "not_reached"]
    assert lines[4] == "a: its agent was lost"


def test_as_json_it_is_the_message_and_holds_everything() -> None:
    text, read = json.dumps(report().to_dict()), manager_pb2.UpdateReport()
    read_json(text.encode(), read)
    assert read == report().message
    held = json.loads(text)
    assert {each["transport"] for each in held["replicas"][0]["edges"]} == {"shared_memory", "file"}
    assert [each["stage"] for each in held["stages"]] == ["STAGE_PLAN", "STAGE_TRANSFER"]


def test_what_no_worker_of_a_replica_takes_is_said_by_report_and_status() -> None:
    message = report().message
    first, second = message.replicas[0].workers
    reason = "was made without its vision tower"
    first.absent.add(prefix="visual.", tensors=3, bytes=2_000, reason=reason)
    second.absent.add(prefix="audio", tensors=1, bytes=20, reason=reason)
    assert UpdateReport(message).replicas[1].absent == ()
    second.absent.extend(first.absent)
    words = f"takes nothing of visual.* (3 tensors, 2.0 kB): its model {reason}"
    (row,) = UpdateReport(message).replicas[1].absent
    assert (row.prefix, row.tensors, row.nbytes, str(row)) == ("visual.", 3, 2_000, words)
    assert f"b: {words}" in UpdateReport(message).details.splitlines()
    status = manager_pb2.GetStatusResponse()
    status.replicas.add(name="b", last_outcome=message.replicas[0])
    assert [str(line) for line in status_command._troubles(status)] == [f"b: {words}"]


def test_bytes_for_people() -> None:
    sizes = (0, 999, 13_118_464, 10**12)
    assert [human_bytes(size) for size in sizes] == ["0 B", "999 B", "13.1 MB", "1.0 TB"]


def test_a_held_report_says_what_relays_hold_and_nothing_of_replicas() -> None:
    message = manager_pb2.UpdateReport(
        identity=weights_pb2.Identity(lineage="run", version=4), seconds=1.5, tensors=2, held=True, prefetch="because"
    )
    message.relays.add(relay="relay a", replicas=["r0", "r1"]).filled.MergeFrom(
        manager_pb2.RelayFilled(bytes=3_000_000, wait_seconds=0.5, fill_seconds=0.25)
    )
    message.relays.add(relay="relay b", replicas=["r2"])
    said = UpdateReport(message)
    assert said.details.splitlines() == [
        "version 4 of run (root , epoch 0): 2 tensors, held by relays after 1.50 s, installs go on",
        "relay a: 3.0 MB in 0.75 s, for r0, r1",
        "relay b: it did not answer, for r2",
        "because",
    ]


def test_a_collective_is_told_and_that_there_was_none_is_not() -> None:
    message = manager_pb2.UpdateReport(collective="a is updated by a collective: because")
    assert UpdateReport(message).details.splitlines()[-1] == "a is updated by a collective: because"
    message.collective = "no collective: every replica reads the weights itself or has a relay"
    assert "collective" not in UpdateReport(message).details


def test_as_text_it_is_two_lines_that_name_what_does_not_serve_and_what_to_do() -> None:
    whole, exceptions = str(report()).splitlines()
    assert whole == "version 4 of run: 1 of 2 replicas serve it after 1.50 s, NOT OK"
    assert exceptions.startswith("a: quarantined (its agent was lost); ")
    assert "ckpt-engine replica retry a" in exceptions


def test_two_lines_stay_two_with_many_replicas_and_long_reasons() -> None:
    message = report().message
    message.ok = True
    message.replicas[1].problem.message = "first\nsecond\n  third"
    message.warnings.extend(["nothing differs from version 3", "another one"])
    for number in range(40):
        lost = message.replicas.add(replica=f"c{number:02}", outcome=manager_pb2.OUTCOME_NOT_REACHED)
        lost.problem.message = f"reason {number}"
    lines = str(UpdateReport(message)).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("41 do not: a: quarantined (first second third); c00: not reached (reason 0); c01: ")
    assert "and 38 more" in lines[1]
    assert "c02" not in lines[1]
    assert "nothing differs from version 3" in lines[1]
    assert "report.details" in lines[1]
    assert "reason 39" in UpdateReport(message).details


def test_a_reason_of_many_words_is_cut_in_the_two_lines_and_whole_in_the_details() -> None:
    message = report().message
    message.replicas[1].problem.message = "tensor " * 1000 + "the end"
    lines = str(UpdateReport(message)).splitlines()
    assert [len(line) < 1000 for line in lines] == [True, True]
    assert ("tensor tensor" in lines[1], "the end" in lines[1]) == (True, False)
    assert "report.details" in lines[1]
    assert "the end" in UpdateReport(message).details


def test_two_lines_of_an_update_that_went_well_have_the_longest_pause_and_what_was_moved() -> None:
    message = report().message
    message.ok = message.verified = True
    del message.replicas[1]
    assert str(UpdateReport(message)).splitlines() == [
        "version 4 of run: 1 of 1 replicas serve it after 1.50 s, verified",
        "longest pause 0.500 s (b); 3.0 MB by shared_memory, file",
    ]


def test_two_lines_name_what_an_operator_holds_and_what_has_another_model() -> None:
    message = report().message
    message.ok = message.verified = True
    message.replicas[1].operator_hold = True
    other = message.replicas.add(replica="z", outcome=manager_pb2.OUTCOME_OLD_SERVING, cannot_load=True)
    other.problem.message = "it lacks lm_head.weight"
    _, exceptions = str(UpdateReport(message)).splitlines()
    assert "ckpt-engine replica release a" in exceptions
    assert "z: serves what it did before (it lacks lm_head.weight)" in exceptions
    assert "start z with the model that is published" in exceptions
    assert "retry" not in exceptions


def test_a_dry_run_is_two_lines_too_and_names_what_would_be_left_out() -> None:
    message = report().message
    message.dry_run = True
    message.replicas[0].outcome = manager_pb2.OUTCOME_PLANNED
    whole, exceptions = str(UpdateReport(message)).splitlines()
    assert whole == "dry run of version 4 of run: an update would bring 3.0 MB to 1 of 2 replicas, NOT OK"
    assert exceptions == "a: quarantined (its agent was lost)"
    assert "worker 0 from" in UpdateReport(message).details

"""The grammar of a drained node's reason: whatever a check has found, we know it again as ours."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.health.reasons import parse_reason, reason_for
from nvrx_slurm.health.result import Action, CheckResult, Status
from nvrx_slurm.slurm.administration import parse_node_records

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,19}", fullmatch=True)
RESULTS = st.builds(
    CheckResult,
    status=st.just(Status.FAIL),
    evidence=st.text(max_size=400),
    scope=st.text(max_size=300),
    action=st.sampled_from(Action),
    check=NAMES,
)


@given(RESULTS, st.integers(0, 10**11))
def test_what_was_written_is_read_back_as_it_was(result: CheckResult, now: int) -> None:
    reason = reason_for(result, float(now))
    read = parse_reason(str(reason))
    assert read is not None
    assert (read.check, read.scope, read.action, read.since) == (
        result.check,
        reason.scope,
        result.action,
        now,
    )
    assert reason.detail.startswith(read.detail)


@given(RESULTS)
def test_it_survives_the_way_through_slurm(result: CheckResult) -> None:
    """scontrol prints it between other fields, with who set it and when in brackets behind it."""
    text = str(reason_for(result, 1795982672.0))
    line = f"NodeName=n1 Arch=x86_64 State=IDLE+DRAIN Partitions=a,b ExtSensorsTemp=n/s Reason={text}"
    (record,) = parse_node_records(f"{line} [root@1795982700]\n")
    assert (record.reason, record.set_by, record.since) == (text, "root", 1795982700)
    assert (record.name, record.state, record.partitions) == ("n1", "idle+drain", ("a", "b"))
    assert len(text) <= 200
    assert not re.search(r"[\n\"'`\[\]]", text)


@given(st.text(max_size=100))
def test_only_what_follows_the_grammar_is_ours(text: str) -> None:
    assert parse_reason(text) is None or text.startswith("nvrx:")


@given(st.text(max_size=100))
def test_no_text_of_others_is_taken_for_ours_because_it_mentions_us(text: str) -> None:
    assert parse_reason(f"bob: nvrx:gpu-ecc:gpu-3:reset 1 {text}") is None

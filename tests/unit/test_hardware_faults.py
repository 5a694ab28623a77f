"""The grammar of nvrx-devcluster inject: what it takes, what it refuses in one sentence, what it changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.devcluster import DevClusterError
from nvrx_slurm.devcluster.hardware import (
    NodeHardware,
    Shape,
    build_library,
    nvml_sim,
    parse_fault,
    target_table,
)
from nvrx_slurm.devcluster.hardware.targets import TARGETS, Target

SHAPE = Shape(gpus=2, links=3, nics=2)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "devcluster.md"
LINK_DOWNED = "/sys/class/infiniband/mlx5_1/ports/1/counters/link_downed"


@pytest.fixture
def hardware(tmp_path: Path) -> NodeHardware:
    made = NodeHardware(tmp_path / "n1", SHAPE, "n1")
    made.heal()
    return made


def inject(hardware: NodeHardware, *faults: str) -> None:
    for fault in faults:
        parse_fault(fault, hardware.shape).apply(hardware)


def files(hardware: NodeHardware) -> dict[str, str]:
    """All files and links, but for the time in the kernel log."""
    found = {}
    for path in sorted(hardware.directory.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"-> {path.readlink()}"
        elif path.is_file():
            found[str(path)] = re.sub(r"^3,\d+,\d+,", "", path.read_text())
    return found


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("gpu.3.xid=79", "'gpu.3.xid=79': this node has GPU 0 to 1"),
        ("nvlink.0.3=down", "'nvlink.0.3=down': this node has NVLink 0 to 2"),
        ("nic.eth0.gone", "'nic.eth0.gone': this node has mlx5_0 to mlx5_1"),
        ("gpu.1.xid", "'gpu.1.xid' is no fault: accepted is gpu.N.xid=1…999"),
        ("gpu.1.xid=0", "'gpu.1.xid=0' is no fault: accepted is gpu.N.xid=1…999"),
        ("gpu.1.xid+=79", "'gpu.1.xid+=79' is no fault: accepted is gpu.N.xid=1…999"),
        ("gpu.1.lost=1", "'gpu.1.lost=1' is no fault: accepted is gpu.N.lost"),
        ("gpu.1.lost+=1", "'gpu.1.lost+=1' is no fault: accepted is gpu.N.lost"),
        ("gpu.1.row_remap=bad", "is no fault: accepted is gpu.N.row_remap=failed|pending|ok"),
        ("gpu.1.ecc_uncorrectable+=-1", "accepted is gpu.N.ecc_uncorrectable=COUNT or +=COUNT"),
        ("gpu.1.ecc_uncorrectable=٣", "accepted is gpu.N.ecc_uncorrectable=COUNT or +=COUNT"),
        ("nvml.nvmlInitt=OK", "this node has no such call; it has nvmlInit, nvmlSystemGet"),
        ("nvml.nvmlInit=OOPS", "accepted is nvml.CALL=CODE|hang|ok"),
        ("nvml.nvmlInit=0", "accepted is nvml.CALL=CODE|hang|ok"),
        ("lustre", "'lustre' is no fault: accepted is lustre=unhealthy|absent|healthy"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_what_is_accepted(fault: str, sentence: str) -> None:
    with pytest.raises(DevClusterError, match=re.escape(sentence)):
        parse_fault(fault, SHAPE)


@pytest.mark.parametrize(
    "fault", ["", "=", "gpu", "gpu.1", "gpu.1.", "gpu.x.lost", "gpu.1.losst", "\n", "gpu.1.lost\n"]
)
def test_an_unknown_fault_is_refused_with_all_that_are_accepted(fault: str) -> None:
    with pytest.raises(DevClusterError) as refused:
        parse_fault(fault, SHAPE)
    said = str(refused.value)
    assert all(target.syntax in said for target in TARGETS)
    assert "\n" not in said
    assert ("did you mean gpu.N.lost?" in said) == ("los" in fault)


def test_without_gpus_and_adapters_there_is_nothing_to_break() -> None:
    for fault, has in (("gpu.0.lost", "no GPU"), ("nic.mlx5_0.gone", "no network adapter")):
        with pytest.raises(DevClusterError, match=f"this node has {has}"):
            parse_fault(fault, Shape(gpus=0, links=0, nics=0))


@given(st.text(max_size=80))
def test_any_text_is_a_fault_or_one_line_of_refusal(text: str) -> None:
    for fault in (text, f"gpu.1.{text}", f"gpu.1.xid={text}", f"nic.mlx5_0.{text}", f"nvml.nvmlInit={text}"):
        said = ""
        try:
            parse_fault(fault, SHAPE)
        except DevClusterError as error:
            said = str(error)
        assert "\n" not in said


def _example(path: str, syntax: str) -> str:
    path = (
        path.replace(".N", ".1").replace(".L", ".2").replace("DEVICE", "mlx5_1").replace("CALL", "nvmlInit")
    )
    value = re.split(r"[|… ]", syntax.partition("=")[2])[0]
    value = {"COUNT": "3", "CODE": "TIMEOUT"}.get(value, value)
    return f"{path}={value}" if value else path


@pytest.mark.parametrize(
    "target",
    [target for target in TARGETS if not target.path.startswith("storage.")],
    ids=lambda target: target.path,
)
def test_every_row_of_the_table_changes_something_that_heal_restores(
    hardware: NodeHardware, target: Target
) -> None:
    well = files(hardware)
    inject(hardware, _example(target.path, target.syntax))
    assert files(hardware) != well
    hardware.heal()
    assert files(hardware) == well


@pytest.mark.parametrize(
    "target", [target for target in TARGETS if "|" in target.syntax], ids=lambda target: target.path
)
def test_the_last_word_of_a_row_is_the_healthy_one(hardware: NodeHardware, target: Target) -> None:
    if target.path in ("nvswitch.sxid", "kernel"):
        return  # a line of the kernel log stays
    well = files(hardware)
    fault = _example(target.path, target.syntax)
    inject(hardware, fault, f"{fault.partition('=')[0]}={target.syntax.rpartition('|')[2]}")
    assert files(hardware) == well


def test_a_counter_is_set_and_added_to(hardware: NodeHardware) -> None:
    inject(hardware, "nic.mlx5_1.link_downed+=2", "nic.mlx5_1.link_downed+=3")
    assert hardware.read(LINK_DOWNED) == "5"
    inject(hardware, "nic.mlx5_1.link_downed=1")
    assert hardware.read(LINK_DOWNED) == "1"
    hardware.write(LINK_DOWNED, "garbage")
    inject(hardware, "nic.mlx5_1.link_downed+=4")
    assert hardware.read(LINK_DOWNED) == "4"


def test_the_numbers_of_the_kernel_log_go_on_over_a_heal(hardware: NodeHardware) -> None:
    inject(hardware, "gpu.0.xid=79", "kernel=oops")
    hardware.heal()
    inject(hardware, "gpu.1.xid=31")
    lines = hardware.at("/dev/kmsg").read_text().splitlines()
    assert [int(line.split(",")[1]) for line in lines] == [3, 4]
    assert lines[1].endswith("NVRM: Xid (PCI:0000:22:00): 31, pid=4242, name=python, simulated")


def test_a_damaged_state_file_is_refused_until_the_node_is_healed(hardware: NodeHardware) -> None:
    hardware.nvml_state.write_text("nvml-sim 1\ngpus")
    with pytest.raises(
        DevClusterError, match="not a whole state file of the simulated NVML: heal the node first"
    ):
        inject(hardware, "gpu.0.lost")
    hardware.heal()
    inject(hardware, "gpu.0.lost")
    assert hardware.nvml("gpu.0.lost") == "1"


def test_gpus_of_two_nodes_are_different_ones(tmp_path: Path) -> None:
    uuids = set()
    for host in ("n1", "n2"):
        node = NodeHardware(tmp_path / host, SHAPE, host)
        node.heal()
        uuids |= {node.nvml(f"gpu.{gpu}.uuid") for gpu in range(2)}
    assert len(uuids) == 4


def test_without_a_compiler_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(
        DevClusterError, match="needs a C compiler, and there is none here: apt-get install gcc"
    ):
        build_library(tmp_path)


def test_what_the_compiler_says_is_in_the_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("#!/bin/sh\necho 'cannot\nexecute' >&2; exit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    with pytest.raises(DevClusterError, match=r"does not compile .*nvml_sim: cannot execute"):
        build_library(tmp_path / "out")
    monkeypatch.setattr(nvml_sim, "_SOURCE", tmp_path / "nowhere")
    with pytest.raises(DevClusterError, match=r"is not in .*nowhere: run from a clone"):
        build_library(tmp_path / "out")


def test_the_calls_that_can_be_made_to_fail_are_those_of_the_simulator() -> None:
    source = (nvml_sim._SOURCE / "nvml_sim.c").read_text()
    assert set(re.findall(r'"(nvml[A-Za-z]+)"', source)) == set(nvml_sim.CALLS)


def test_the_page_has_the_table_of_faults() -> None:
    (found,) = re.findall(r"<!-- table: .*?target_table -->\n(.*?)<!-- end -->", PAGE.read_text(), re.S)
    assert found.rstrip("\n") == target_table()

"""Families: what a line is, whoever words it; and the file that says so."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from pattern_examples import examples_of
from shared_data import shared_data

from nvrx_slurm.attribution.logs.finding import Source
from nvrx_slurm.attribution.logs.rules import BUILT_IN, Role, Rule, RulesError, load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner
from nvrx_slurm.attribution.logs.triggers import is_telling

RULES = load_rules()
LABELLED = shared_data("failure_lines.json")
_DATA = yaml.safe_load((Path(__file__).parent / "data/attribution_lines.yaml").read_text())
LINES: dict[str, list[str]] = _DATA["lines"]
HARMLESS: list[str] = _DATA["harmless"]
CASES = [(category, line) for category, lines in LINES.items() for line in lines]


def categories(text: str | bytes) -> list[str]:
    scanner = LogScanner(Source(Path("log")), RULES)
    scanner.feed(text.encode() if isinstance(text, str) else text)
    return [finding.family.id for finding in scanner.finish().findings]


@pytest.mark.skipif(not LABELLED.is_file(), reason=f"the labelled lines are not at {LABELLED}")
def test_every_labelled_line_gets_its_category_and_policy() -> None:
    wrong = []
    for case in json.loads(LABELLED.read_text()):
        family = RULES.classify(case["line"])
        found = (
            (family.id, family.role.value, family.scope.value, family.restart.value, family.exclude.value)
            if family
            else None
        )
        if found != tuple(case[key] for key in ("category", "role", "scope", "restart", "exclude")):
            wrong.append((case["id"], found))
    assert wrong == []


@pytest.mark.parametrize(("category", "line"), CASES)
def test_a_kind_is_recognised_however_it_is_worded(category: str, line: str) -> None:
    family = RULES.classify(line)
    assert (family.id if family else None) == category


@pytest.mark.parametrize(("category", "line"), CASES)
def test_the_scan_misses_no_line_that_a_rule_knows(category: str, line: str) -> None:
    assert categories(line) == [category]


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_no_root(line: str) -> None:
    family = RULES.classify(line)
    assert family is None or family.role is Role.BENIGN or not family.decides, family


def test_every_family_that_decides_is_known_by_a_line_of_ours_or_by_no_line() -> None:
    without = {rule.family.id for rule in RULES.rules if not rule.patterns}
    decide = {family.id for family in RULES.families.values() if family.decides}
    other = {
        "nccl.proxy_failure",
        "net.ib_comm_fatal",
        "net.ib_wc_error",
        "net.ib_async_fatal",
        "net.efa_config",
        "nccl.system_error",
    }
    other |= {"slurm.requeued", "slurm.max_requeue_held", "gpu.nvlink_peer_fault"}
    assert decide - without - set(LINES) <= other
    assert without == {"job.hang"}


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES.rules if rule.family.role is not Role.BENIGN], ids=lambda rule: rule.id
)
def test_what_a_pattern_matches_is_looked_at(rule: Rule) -> None:
    """The cheap search for words must not hide a line from the patterns: lines are made from each."""
    hidden = []
    for pattern in rule.patterns:
        if "{xid" in pattern or "inf" in pattern:  # the shortest line runs words together
            continue
        for text in examples_of(pattern, 6):
            skeleton = text.lower().encode().translate(None, b"0123456789")
            if not is_telling(b" ".join(skeleton.split())):
                hidden.append((pattern, text))
    assert hidden == []


class TestSiteRules:
    def write(self, path: Path, text: str) -> Path:
        path.write_text("version: 1\nfamilies:\n" + text)
        return path

    def test_a_site_adds_families_of_its_own_before_the_built_in_ones(self, tmp_path: Path) -> None:
        site = self.write(
            tmp_path / "site.yaml",
            "- id: site.license\n  policy: [root, external, yes, no]\n  says: no license\n"
            "  match: ['license server .{0,40}refused']\n",
        )
        family = load_rules(site).classify(
            "ERROR license server lic1 refused the connection: Connection refused"
        )
        assert family is not None
        assert (family.id, family.restart.value) == ("site.license", "yes")

    def test_a_site_changes_the_policy_of_a_built_in_family_and_keeps_its_patterns(
        self, tmp_path: Path
    ) -> None:
        site = self.write(
            tmp_path / "a.yaml", "- id: mem.cuda_oom\n  policy: [root, user_code, 'no', 'no']\n"
        )
        family = load_rules(site).classify("RuntimeError: CUDA out of memory.")
        assert family is not None
        assert (family.id, family.restart.value) == ("mem.cuda_oom", "no")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("- id: a\n  match: ['x']\n", "policy"),
            ("- id: a\n  policy: [root, gpu, maybe, no]\n", "maybe.*yes, bounded, no, defer"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['(unclosed']\n", "unclosed"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['a.*b']\n", "without a bound"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['(a+)+b']\n", "bound|repetition"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['((a{0,20})){0,20}b']\n", "repetition"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['(?:a|aa){0,400}b']\n", "match alike"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['a+a+a+b']\n", "ways.*are accepted"),
            (f"- id: a\n  policy: [root, gpu, yes, no]\n  match: ['{'(a|a)' * 25}b']\n", "ways"),
            (f"- id: a\n  policy: [root, gpu, yes, no]\n  match: ['{'a?' * 25}b']\n", "ways"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['(a)?(?(1)b|c)']\n", "refers back"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['x{0,9}']\n", "matches every line"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  regex: ['a']\n", "unknown key regex"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: abc\n", "`match` must be a list of texts"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: [5]\n", "`match` must be a list of texts"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  match: ['']\n", "`match` must be a list of texts"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  strength: high\n", "`strength` must be a whole"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  strength: .nan\n", "`strength` must be a whole"),
            ("- id: a\n  policy: [root, gpu, yes, no]\n  soft: maybe\n", "`soft` must be true or false"),
            ("- id: a\n  is: [a]\n", "`is` must be a family's id"),
            ("- id: a.b\n  is: nowhere\n  match: ['a']\n", "names no family"),
        ],
    )
    def test_a_wrong_file_is_refused_with_what_is_accepted(
        self, tmp_path: Path, text: str, says: str
    ) -> None:
        with pytest.raises(RulesError, match=says):
            load_rules(self.write(tmp_path / "wrong.yaml", text))

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(RulesError, match=r"none\.yaml"):
            load_rules(tmp_path / "none.yaml")


def test_no_line_costs_more_than_its_length_allows() -> None:
    """The worst inputs that we know, against every pattern: 4 KiB at a time must stay in milliseconds."""
    evil = [
        "error " * 700,
        "a" * 4000,
        "nccl " * 800,
        "(" * 4000,
        "xid (" * 800,
        " " * 4000 + "x",
        "1." * 2000,
    ]
    began = time.process_time()
    for text in evil:
        RULES.classify(text)
    assert time.process_time() - began < 5.0


def test_the_file_is_of_the_version_that_is_read() -> None:
    assert BUILT_IN.read_text().count("\nversion: 1\n") == 1


def test_the_document_lists_every_family_as_it_is() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs/attribution.md").read_text()
    rows = [
        f"| {f.id} | {f.says} | {f.role.value} | {f.scope.value} | {f.restart.value} | {f.exclude.value} |"
        for f in RULES.families.values()
    ]
    table = document.partition("| family | means |")[2].partition("\n\n")[0].splitlines()[2:]
    assert table == rows

"""``nvrx-attribute``: what failed first, whose fault it is, and whether another try makes sense."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from nvrx_slurm.attribution.evidence import CycleEvidence
    from nvrx_slurm.attribution.logs.rules import RuleSet
    from nvrx_slurm.attribution.policy import PolicyConfig
    from nvrx_slurm.attribution.verdict import Attribution

_INCONCLUSIVE = 3
_SLURM_TIMEOUT_S = 3.0
_FOLLOW_S = 1.0


class _Refused(click.ClickException):
    exit_code = 2

    def show(self, file: object = None) -> None:
        click.echo(f"nvrx-attribute: {self.message}", err=True)


_PATH = click.Path(path_type=Path)
_rules_option = click.option(
    "--rules",
    "rules_file",
    type=_PATH,
    envvar="NVRX_ATTRIBUTION_RULES",
    help="The site's own families (YAML).",
)
_policy_option = click.option(
    "--policy", "policy_file", type=_PATH, envvar="NVRX_ATTRIBUTION_POLICY", help="The site's numbers (YAML)."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_follow_option = click.option("--follow", is_flag=True, help="Read on as the log grows, until Ctrl-C.")
_bundle_option = click.option(
    "--bundle", type=_PATH, help="Write verdict and evidence, secrets redacted: NAME.tar.zst or NAME.tar.gz."
)
_checkpoints_option = click.option(
    "--checkpoint-dir",
    "checkpoints",
    type=_PATH,
    help="Where the job saves checkpoints: how far they have come, if nothing else tells.",
)
_explain_option = click.option(
    "--explain",
    "explain_config",
    type=_PATH,
    help="Ask the model that this file (YAML) names for an explanation.",
)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            # What is left in the buffer is written once more at exit: not to where it fails again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise _Refused(f"the answer cannot be written: {error.strerror}") from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Tell what failed first, whose fault it is, and whether another try makes sense.

    Exit codes: 0 a cause was found, 3 none was, 2 the input is wrong.
    """


@main.command("log")
@click.argument("files", nargs=-1, type=_PATH)
@click.option(
    "--kernel-log", "kernel", multiple=True, metavar="NODE=FILE", help="A node's kernel log: its words prove."
)
@click.option(
    "--slurm-log", "slurm", multiple=True, type=_PATH, help="What Slurm itself wrote, no program's output."
)
@click.option(
    "--job",
    default="",
    metavar="JOBID",
    help="In --slurm-log, which may tell of many jobs, only this one counts.",
)
@click.option("--dumps", type=_PATH, help="Directory of Flight Recorder dumps of the same stall.")
@_checkpoints_option
@_rules_option
@_policy_option
@_json_option
@_follow_option
@_bundle_option
@_explain_option
def log_command(
    files: tuple[Path, ...],
    kernel: tuple[str, ...],
    slurm: tuple[Path, ...],
    job: str,
    dumps: Path | None,
    checkpoints: Path | None,
    rules_file: Path | None,
    policy_file: Path | None,
    as_json: bool,
    follow: bool,
    bundle: Path | None,
    explain_config: Path | None,
) -> None:
    """Attribute the failure that logs show: rank logs, merged logs, or the output of any Slurm job."""
    from nvrx_slurm.attribution.evidence import CycleEvidence
    from nvrx_slurm.attribution.logs.finding import Source, SourceKind

    if not (files or slurm or kernel):
        raise _Refused("nothing to read: give it logs, or --slurm-log or --kernel-log")
    sources = [Source(path) for path in files]
    sources += [Source(path, SourceKind.SCHEDULER, job=job) for path in slurm]
    for argument in kernel:
        node, equals, path = argument.partition("=")
        if not (node and equals and path):
            raise _Refused(f"--kernel-log {argument}: NODE=FILE is expected, such as n3=/var/log/kern.log")
        sources.append(Source(Path(path), SourceKind.KERNEL, node=node))
    for source in sources:
        _must_be_readable(source.path)
    rules, config = _load(rules_file, policy_file)
    evidence = _with_checkpoints(
        CycleEvidence(job=job, logs=tuple(sources), dumps=_directory(dumps)), checkpoints
    )
    result = (
        _follow(evidence, rules, config, quiet=as_json) if follow else _attribute(evidence, rules, config)
    )
    _finish(result, as_json=as_json, bundle=bundle, explain_config=explain_config)


@main.command("fr")
@click.argument("directory", type=_PATH)
@click.option(
    "--world-size",
    type=click.IntRange(1, 1_000_000),
    help="Ranks of the job, so that missing dumps are seen.",
)
@_json_option
def fr_command(directory: Path, world_size: int | None, as_json: bool) -> None:
    """Find the rank that everybody waits for in a directory of Flight Recorder dumps."""
    from nvrx_slurm.attribution.flight_recorder import analyze_directory
    from nvrx_slurm.attribution.render import render_flight

    _directory(directory)
    report = _or_refuse(lambda: analyze_directory(directory, world_size=world_size))
    if not report.present:
        more = f" ({'; '.join(report.caveats[:3])})" if report.caveats else ""
        raise _Refused(
            f"{directory} holds no usable dump: files that torch's Flight Recorder wrote are expected{more}"
        )
    if as_json:
        click.echo(json.dumps(report.document(), indent=2))
    else:
        _console().print(render_flight(report))
    sys.exit(0 if report.conclusive else _INCONCLUSIVE)


@main.command("job")
@click.argument("run", metavar="RUN_DIR|JOBID")
@click.option(
    "--cycle", type=click.IntRange(0), help="The cycle to look at; by default the last that a fault ended."
)
@click.option(
    "--record", is_flag=True, help="Keep the verdict in the job's history, for the next one to count."
)
@_checkpoints_option
@_rules_option
@_policy_option
@_json_option
@_follow_option
@_bundle_option
@_explain_option
def job_command(
    run: str,
    cycle: int | None,
    record: bool,
    checkpoints: Path | None,
    rules_file: Path | None,
    policy_file: Path | None,
    as_json: bool,
    follow: bool,
    bundle: Path | None,
    explain_config: Path | None,
) -> None:
    """Attribute what ended a cycle of an nvrx-srun job."""
    from nvrx_slurm.attribution.attribute import as_attempt
    from nvrx_slurm.attribution.from_journal import NoSuchCycleError, cycle_evidence, earlier_attempts
    from nvrx_slurm.attribution.history import append_history
    from nvrx_slurm.journal import JournalError, read_journal

    journal = _locate(run)
    rules, config = _load(rules_file, policy_file)
    try:
        records = read_journal(journal)
        evidence = cycle_evidence(journal.parent, records, cycle)
    except (JournalError, NoSuchCycleError) as error:
        raise _Refused(str(error)) from error
    except OSError as error:
        raise _Refused(f"{journal}: {error.strerror or error}") from error
    evidence = _with_checkpoints(evidence, checkpoints)
    earlier = _or_refuse(lambda: earlier_attempts(journal.parent, records, evidence.cycle))
    if follow:
        result = _follow(evidence, rules, config, quiet=as_json, history=earlier)
    else:
        result = _attribute(evidence, rules, config, earlier)
    if record:
        _or_refuse(lambda: append_history(journal.parent, as_attempt(result, evidence.seconds)))
    _finish(result, as_json=as_json, bundle=bundle, explain_config=explain_config)


@main.group("rules")
def rules_group() -> None:
    """Look at the families of failures, and try them on lines."""


@rules_group.command("list")
@_rules_option
@_json_option
def rules_list(rules_file: Path | None, as_json: bool) -> None:
    """List every family with what follows from it."""
    from rich.table import Table

    rules, _ = _load(rules_file, None)
    families = list(rules.families.values())
    if as_json:
        click.echo(json.dumps([_family_document(family) for family in families], indent=2))
        return
    table = Table("family", "role", "scope", "restart", "exclude", "says", box=None, header_style="bold")
    for family in families:
        row = (family.role.value, family.scope.value, family.restart.value, family.exclude.value)
        table.add_row(family.id, *row, family.says)
    _console().print(table)


@rules_group.command("explain")
@click.argument("family_id", metavar="FAMILY")
@_rules_option
@_json_option
def rules_explain(family_id: str, rules_file: Path | None, as_json: bool) -> None:
    """Show one family: its patterns, and what follows from it."""
    rules, _ = _load(rules_file, None)
    family = rules.families.get(family_id)
    if family is None:
        near = [name for name in rules.families if family_id.split(".")[0] in name]
        raise _Refused(f"no family {family_id}: {', '.join(near) or 'see `nvrx-attribute rules list`'}")
    patterns = [
        (rule.source, p) for rule in rules.rules if rule.family.id == family_id for p in rule.patterns
    ]
    document = {**_family_document(family), "patterns": [pattern for _, pattern in patterns]}
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for key, value in document.items():
        if key != "patterns":
            click.echo(f"{key:<10} {value}")
    for source, pattern in patterns:
        click.echo(f"{source:<16} {pattern}")


@rules_group.command("test")
@click.argument("lines", nargs=-1)
@click.option(
    "--labelled", type=_PATH, help="JSON list of {line, category}: tell what is classified differently."
)
@_rules_option
@_json_option
def rules_test(lines: tuple[str, ...], labelled: Path | None, rules_file: Path | None, as_json: bool) -> None:
    """Tell the family of each LINE, or of each line of standard input.

    Exits 0 if every line has a family, or, with --labelled, the right one; else 3.
    """
    rules, _ = _load(rules_file, None)
    cases = (
        _labelled(labelled) if labelled else [(line, None) for line in lines or sys.stdin.read().splitlines()]
    )
    rows: list[dict[str, Any]] = []
    for line, expected in cases:
        rule = rules.match(line)
        found = rule.family if rule else None
        rows.append({"line": line, "category": found.id if found else None, "expected": expected})
    wrong = [row for row in rows if row["category"] is None or row["expected"] not in (None, row["category"])]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        for row in wrong if labelled else rows:
            instead = f"  (expected {row['expected']})" if labelled else ""
            shown = "".join(c if c.isprintable() else " " for c in row["line"][:160])
            click.echo(f"{row['category'] or '-':<24}{instead} {shown}")
        if labelled:
            click.echo(f"{len(rows) - len(wrong)} of {len(rows)} lines right")
    sys.exit(_INCONCLUSIVE if wrong else 0)


def _labelled(path: Path) -> list[tuple[str, str | None]]:
    from nvrx_slurm.attribution.site_file import SiteFileError, read_text

    try:
        return [(case["line"], case["category"]) for case in json.loads(read_text(path))]
    except SiteFileError as error:
        raise _Refused(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Refused(f"{path}: a JSON list of objects with `line` and `category` is expected") from error


def _family_document(family: Any) -> dict[str, Any]:
    return {
        "family": family.id,
        "says": family.says,
        "role": family.role.value,
        "scope": family.scope.value,
        "restart": family.restart.value,
        "exclude": family.exclude.value,
        "strength": family.strength,
        "soft": family.soft,
        "transient": family.transient,
    }


def _load(rules_file: Path | None, policy_file: Path | None) -> tuple[RuleSet, PolicyConfig]:
    from nvrx_slurm.attribution.logs.rules import RulesError, load_rules
    from nvrx_slurm.attribution.policy import PolicyConfig, PolicyError, load_policy

    try:
        return load_rules(rules_file), load_policy(policy_file) if policy_file else PolicyConfig()
    except (RulesError, PolicyError) as error:
        raise _Refused(str(error)) from error


def _attribute(
    evidence: CycleEvidence, rules: RuleSet, config: PolicyConfig, history: list[Any] | None = None
) -> Attribution:
    from nvrx_slurm.attribution.attribute import attribute

    return attribute(evidence, rules, config, history or [])


def _follow(
    evidence: CycleEvidence,
    rules: RuleSet,
    config: PolicyConfig,
    *,
    quiet: bool,
    history: list[Any] | None = None,
) -> Attribution:
    """Show every change of the verdict while the logs grow; the last one is returned."""
    from nvrx_slurm.attribution.follow import Follower

    follower = Follower(evidence, rules, config, history or [])
    console = _console()
    try:
        while True:
            changed = _or_refuse(follower.update)
            if changed and not quiet:
                console.print(follower.line())
            time.sleep(_FOLLOW_S)
    except KeyboardInterrupt:
        return follower.finish()


def _finish(
    result: Attribution, *, as_json: bool, bundle: Path | None, explain_config: Path | None
) -> NoReturn:
    from nvrx_slurm.attribution.render import render

    if explain_config is not None:
        result = _explained(result, explain_config)
    if bundle is not None:
        _write_bundle(result, bundle)
    try:
        if as_json:
            click.echo(json.dumps(result.document(), indent=2))
        else:
            _console().print(render(result))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0 if result.found else _INCONCLUSIVE)


def _explained(result: Attribution, path: Path) -> Attribution:
    from nvrx_slurm.attribution.explain.ask import explain
    from nvrx_slurm.attribution.explain.config import ExplainConfigError, load_explain_config

    try:
        return explain(result, load_explain_config(path))
    except ExplainConfigError as error:
        raise _Refused(str(error)) from error


def _write_bundle(result: Attribution, path: Path) -> None:
    from nvrx_slurm.attribution.bundle import BundleError, write_bundle

    try:
        written = _or_refuse(lambda: write_bundle(result, path))
    except BundleError as error:
        raise _Refused(str(error)) from error
    click.echo(f"nvrx-attribute: {written.say()}", err=True)


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def _locate(run: str) -> Path:
    from nvrx_slurm.report.source import NoSuchRunError, locate
    from nvrx_slurm.slurm import HostlistError, ScontrolClient, SlurmUnavailableError, UnknownJobError

    def work_dir(job: str) -> Path | None:
        try:
            return ScontrolClient(timeout_s=_SLURM_TIMEOUT_S).job(job).work_dir
        except (SlurmUnavailableError, UnknownJobError, HostlistError):
            return None

    try:
        return locate(run, environ=os.environ, work_dir=work_dir)
    except NoSuchRunError as error:
        raise _Refused(str(error)) from error
    except OSError as error:
        raise _Refused(f"{error.filename or run}: {error.strerror or error}") from error


def _must_be_readable(path: Path) -> None:
    from nvrx_slurm.attribution.logs.reading import check_log

    try:
        check_log(path)
    except OSError as error:
        raise _Refused(f"{path}: {error.strerror or error}") from error


def _with_checkpoints(evidence: CycleEvidence, directory: Path | None) -> CycleEvidence:
    """Return the evidence with what a directory of checkpoints shows, if the journal does not tell."""
    from nvrx_slurm.attribution.checkpoint_dir import newest_checkpoint

    if directory is None or evidence.saved_step is not None:
        return evidence
    return dataclasses.replace(evidence, saved_step=_or_refuse(lambda: newest_checkpoint(directory)))


def _directory(path: Path | None) -> Path | None:
    if path is not None and not path.is_dir():
        raise _Refused(f"{path} is no directory: one with Flight Recorder dumps is expected")
    return path


def _or_refuse(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        raise _Refused(f"{error.filename or 'file'}: {error.strerror or error}") from error

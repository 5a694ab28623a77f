"""All rules over one batch script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nvrx_slurm.doctor.batch_file import BatchFile
from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.lint_directives import DIRECTIVES
from nvrx_slurm.doctor.lint_launch import LAUNCH, job_times
from nvrx_slurm.doctor.timeouts import Ladder, OwnTimes, ladders
from nvrx_slurm.slurm import SiteConfig


def lint(file: BatchFile, own: OwnTimes, site: SiteConfig | None) -> tuple[list[Finding], list[Ladder]]:
    """Return what is not as it should be, by line, and the script's time-outs.

    A time-out that the script does not say, or a site that could not be asked, is no finding.
    """
    found = [*DIRECTIVES.apply(file), *LAUNCH.apply(file)]
    rungs = file_ladders(file, own, site)
    found += [
        _at_launch(file, finding)
        for ladder in rungs
        for finding in ladder.findings()
        if finding.status in (Status.WARN, Status.PROBLEM)
    ]
    return sorted(found, key=lambda finding: finding.answer.line or 0), list(rungs)


def file_ladders(file: BatchFile, own: OwnTimes, site: SiteConfig | None) -> Sequence[Ladder]:
    """Return the time-outs of the script's first nvrx-srun line; none without one."""
    if not file.launches or file.launches[0].refused:
        return []
    return ladders(job_times(file, file.launches[0]), own, site)


def _at_launch(file: BatchFile, finding: Finding) -> Finding:
    line = file.launches[0].command.line
    return replace(finding, answer=replace(finding.answer, line=line, text=file.line_text(line)))

"""What is wrong with a site, a batch script or a job, and what to do: readers → snapshot → rules → findings.

The rules are pure functions of a snapshot; docs/doctor.md lists them by number.
"""

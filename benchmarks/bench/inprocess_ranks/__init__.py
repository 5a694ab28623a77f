"""Ranks of in-process restart that do what a plan says: for the tests and the chaos benchmark."""

"""Build entry point; everything declarative is in setup.cfg."""

from setuptools import setup

setup()

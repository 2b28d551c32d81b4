"""`python -m dpulr` is `dpulr`."""

from dpulr.cli.main import entry

entry()

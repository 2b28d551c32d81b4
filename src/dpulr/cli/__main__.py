"""`python -m dpulr.cli`."""

from dpulr.cli.main import entry

if __name__ == "__main__":
    entry()

"""Runs that the documentation quotes. Each is a module with a command line."""

"""`dpulr.evaluate` lives in dpulr.scores."""

from dpulr.scores import evaluate

__all__ = ["evaluate"]

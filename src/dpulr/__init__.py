"""Differentially private training of PyTorch models by forward passes alone."""

__version__ = "0.1.0"

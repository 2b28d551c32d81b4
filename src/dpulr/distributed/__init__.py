"""One run on several processes: torch.distributed moves the sums, this package says who adds what (docs/scale.md)."""

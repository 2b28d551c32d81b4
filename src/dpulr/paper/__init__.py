"""DP-ULR to the letter, as its paper prints it. It has no privacy guarantee (docs/errata.md)."""

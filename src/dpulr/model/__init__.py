"""A user's model, seen by forward passes: its trained layers, where noise goes in, and what lies downstream."""

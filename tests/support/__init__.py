"""What several tests share: models, data, a small job, oracles, and `dpulr` called in the test's process."""

"""Other people's training loops and loggers: thin, each with its own extra. Each file says what it must not log."""

"""The run around the steps of an algorithm: loop, directory, logs, state, recovery, replay."""

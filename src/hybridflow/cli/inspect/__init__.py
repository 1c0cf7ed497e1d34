"""What is read from the files of a run: its page, timeline, table and comparison. Training never imports it."""

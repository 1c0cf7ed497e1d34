"""What a run does after a failure: snapshots to go back to, new processes, and when to give up."""

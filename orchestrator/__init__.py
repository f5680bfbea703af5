"""The driver: commands, run state machine, placement, dedup, report."""

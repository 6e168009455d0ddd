"""What saving a run costs the run."""

"""What launchers leave of a step on all ranks or none (``attempt``), when a rank raises or dies."""

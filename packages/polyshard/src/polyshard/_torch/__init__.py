"""Every private torch name, so that a new torch is checked in one room."""

"""What the engine costs the host: its Python, its launches, its copies to and from a device."""

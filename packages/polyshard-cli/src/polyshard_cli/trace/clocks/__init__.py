"""How far the clocks of ranks are apart."""

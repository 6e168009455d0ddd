"""What one rank writes while it trains."""

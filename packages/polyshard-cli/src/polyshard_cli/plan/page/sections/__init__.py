"""What a page is composed of: each file makes one section of it."""

"""Shards and gradients that rest elsewhere, and what is known of them there."""

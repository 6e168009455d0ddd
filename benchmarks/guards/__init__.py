"""What guards cost."""

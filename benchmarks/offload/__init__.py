"""What polyshard-offload costs, and what a disk gives."""

"""What bits that do not depend on the number of ranks cost."""

"""What a group runs to gather and to reduce: operations, the executor, and their compilers."""

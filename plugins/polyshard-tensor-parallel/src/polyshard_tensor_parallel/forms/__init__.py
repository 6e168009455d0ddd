"""A parameter on a tensor-parallel mesh, as FSDP shards it and as state dicts hold it."""

"""Which rank holds which elements: meshes, layouts and placements."""

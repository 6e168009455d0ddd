"""Reports of sections, for a terminal or as one page of HTML without script or network."""

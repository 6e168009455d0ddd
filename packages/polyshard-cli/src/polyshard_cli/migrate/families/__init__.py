"""One file an engine: what is certain becomes an edit, and everything else a finding."""

"""The plan as it is handed over: what to look at, a document, tables."""

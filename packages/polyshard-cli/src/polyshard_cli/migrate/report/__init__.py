"""The report: a document, as JSON or for people."""

"""What is said of it: a document, as JSON or for people."""

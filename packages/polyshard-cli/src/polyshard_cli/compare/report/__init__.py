"""What was found: a document, tables of it, a picture of it."""

"""The documentation as a site: which pages, under which addresses, and what is made for it."""

"""The sections of the document, each a function from the page to its text."""

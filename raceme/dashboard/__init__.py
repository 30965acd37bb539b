"""A run in the browser: its store read as it grows, and a page that draws it."""

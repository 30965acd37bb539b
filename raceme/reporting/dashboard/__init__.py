"""A run in the browser: its store read as it grows, and the page that draws it."""

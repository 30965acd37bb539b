"""Figures, tables, pages and the terminal."""

"""Comparisons of methods: suites, runs, tables, figures."""

"""FAACL, FAACL-Async and C-FAACL: clusters that support each other."""

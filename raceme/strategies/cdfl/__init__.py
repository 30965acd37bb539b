"""CDFL, and its baseline FedSoft."""

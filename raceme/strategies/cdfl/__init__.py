"""CDFL, and FedSoft, which it is compared with."""

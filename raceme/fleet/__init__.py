"""Real devices and servers: serve, device, certificates, and a testbed."""

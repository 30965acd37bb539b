"""Real devices and servers: the device runtime, certificates, and what runs a testbed."""

"""How a device says that it waits for work at the server, where the server can let it."""

WAIT_HEADER = "raceme-wait"
"""In the metadata of a request for work: the seconds that its answer may take. In those of the
answer: the server is Raceme's and knows of it, so the device may ask again at once."""
LONGEST_WAIT = 15.0
"""Seconds; routers drop connections on which nothing happens for longer than about a minute."""

"""Methods in users' own Flower apps: the place of one of Flower's strategies, and its manners.

A user's ClientApp knows nothing of Raceme. What it is sent and what it returns is translated by
:mod:`~raceme.server.drop_in.grid`, so that the loop needs to know nothing of it either; rounds are
counted by :mod:`~raceme.server.drop_in.rounds`, progress is told by
:mod:`~raceme.server.drop_in.teller`, and :mod:`~raceme.server.drop_in.run` puts it together.
"""

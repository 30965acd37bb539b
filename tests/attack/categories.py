"""All categories of attacks."""

from __future__ import annotations

from . import calls, config, files, ports, replies, signals
from .case import Category

CATEGORIES = {
    category.name: category
    for category in (
        Category("replies", replies.SUBJECTS, replies.attack, share=3.0),
        Category("pages", ("casa", "csafl", "ewc"), replies.attack_pages),
        Category("config", config.SUBJECTS, config.attack),
        Category("nested", config.NESTED, config.attack),
        Category("files", files.SUBJECTS, files.attack),
        Category("ports", ports.SUBJECTS, ports.attack),
        Category("calls", calls.SUBJECTS, calls.attack),
        Category("signals", signals.SUBJECTS, signals.attack),
    )
}

"""Who may look: browsers on this machine, or with the token, and no page of another site."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import URL, Headers, MutableHeaders, QueryParams
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "raceme-token"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Refuses requests that are not the person's own, and tells browsers to be strict.

    A page of another site can have its name point to this machine (DNS rebinding): the browser then
    takes the answer for that site's. The name stands in the Host header, and is none of ours.

    Parameters
    ----------
    app : ASGIApp
        What answers.
    host : str
        The address that is listened at.
    token : str
        What a browser has to know; empty if it need not know anything.
    """

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self._app, self._host, self._token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_strict(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._answer(Headers(scope=scope), scope)(scope, receive, send_strict)

    def _answer(self, headers: Headers, scope: Scope) -> ASGIApp:
        if not self._is_ours(headers.get("host", "")):
            return PlainTextResponse("This address is not the dashboard's.\n", 400)
        if not self._token:
            return self._app
        given = QueryParams(scope["query_string"]).get("token", "")
        if self._is_token(given):
            # The token leaves the address bar, and with it the history.
            answer = RedirectResponse(URL(scope=scope).remove_query_params("token").path or "/")
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        if self._is_token(_cookie(headers.get("cookie", ""))):
            return self._app
        return PlainTextResponse(
            "This page needs its token: open the address with ?token=… that was printed when it "
            "was started.\n",
            403,
        )

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _is_ours(self, header: str) -> bool:
        """Return whether a Host header names this machine."""
        name = _without_port(header).lower()
        if name in ("localhost", self._host.lower(), socket.gethostname().lower()):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # A number cannot be made to point elsewhere.
        return address.is_loopback or not is_loopback(self._host)


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _without_port(header: str) -> str:
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
